"""One run from configuration to exit code: directory, log, Ray, trainer, and the end of all."""

import contextlib
import logging
import secrets
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minirl.bounded import Ending, bounded
from minirl.business_log import ConsoleHandler, LogServer, attach
from minirl.config import MiniRLConfig
from minirl.devices import REMEDY, unused_accelerator
from minirl.half_loops import RolloutOnlyTrainer, TrainOnlyTrainer
from minirl.interruption import SIGNAL_BASE, Interrupted, interrupting, uninterrupted
from minirl.mock_loop import run_mock_loop
from minirl.output_redirection import redirected_output
from minirl.plan import RunPlan, make_plan
from minirl.process_tree import MemoryWatch, become_subreaper, end_descendants, is_running
from minirl.progress import ProgressView
from minirl.ray_cluster import ray_session, resource_name, session_directory
from minirl.ray_probe import check_cluster
from minirl.recorded_samples import RecordedSamples, vocab_size
from minirl.resume import FRESH, Beginning, find_resumption
from minirl.reward_log import reward_log
from minirl.run_output import RunOutput, create_run_dir, open_run_dir, run_lock
from minirl.system import RLSystem
from minirl.task_data import load_task_data
from minirl.trainer import Evaluation, Trainer
from minirl.worker_process import ProcessSettings
from rl_core.channel import new_key
from rl_core.errors import in_one_line
from rl_core.logs import kv

_logger = logging.getLogger(__name__)

_STOP_S = 12.0
_SETTLE_S = 5.0
_HIGH_LR = 1e-4


class TaskRunner:
    """Runs the trainer in this process, with the workers in Ray actors.

    The trainer is not a Ray actor of its own: it shares the terminal, the signals and the exit
    code with the command, and a process less starts.
    """

    def __init__(self, config: MiniRLConfig) -> None:
        self._config = config
        self._started = time.monotonic()
        self._end = Ending()

    def run(self) -> int:
        """The exit code: 0, 1 after a failure, 128 + n after signal n. ConfigError comes out."""
        attach(ConsoleHandler())  # what is told before there is a run directory
        self._resumption = find_resumption(self._config)
        if self._resumption is not None:
            # What a run that died has published must be what the engines get now.
            self._config.checkpoint_engine.debug.verify_light_transfer = True
        self._plan = make_plan(self._config)
        if self._resumption is not None:
            self._resumption.check(self._config, self._plan.model_path)
        check_cluster(self._config.cluster, resource_name(self._plan.device), self._plan.slots)
        self._recorded = _recorded(self._plan)
        with contextlib.ExitStack() as self._ending, reward_log() as log:
            self._data = load_task_data(self._plan, log.path)
            with contextlib.closing(self._data.scorer):
                run_dir = self._run_dir()
                log.target = run_dir / "logs" / "reward.log"
                with run_lock(run_dir):
                    self._beginning = self._begin(run_dir)
                    return self._run_in(run_dir)

    def _run_dir(self) -> Path:
        resumption = self._resumption
        if resumption is not None and resumption.checkpoint is not None:
            self._data.loader.load_state(resumption.state.data)
        if resumption is not None and resumption.run_dir is not None:
            return open_run_dir(resumption.run_dir)
        return create_run_dir(self._config.trainer.run_dir)

    def _begin(self, run_dir: Path) -> Beginning:
        return FRESH if self._resumption is None else self._resumption.begin(run_dir)

    def _run_in(self, run_dir: Path) -> int:
        become_subreaper()
        with (
            session_directory(self._config.cluster) as self._directory,
            redirected_output(run_dir / "logs" / "driver.log") as stream,
            ProgressView(self._config.trainer.total_training_steps, stream) as self._view,
            RunOutput(run_dir, self._config, self._beginning.state) as output,
            MemoryWatch() as self._memory,
        ):
            attach(ConsoleHandler(stream, self._view.console))
            return self._guarded(output)

    def _guarded(self, output: RunOutput) -> int:
        status, code = "failed", 1
        parts = contextlib.ExitStack()
        try:
            with interrupting():
                self._run(output, parts)
            status, code = "ok", 0
        except Interrupted as interruption:
            status, code = "interrupted", SIGNAL_BASE + interruption.number
            _logger.error("Run interrupted by %s", interruption)  # noqa: TRY400
        except (Exception, SystemExit) as error:  # noqa: BLE001  (the edge of the process)
            # One line for the person; the trace is in the driver's log file.
            _logger.error("Run failed: %s: %s", type(error).__name__, in_one_line(error))  # noqa: TRY400
            _written("trace", traceback.print_exc)
        finally:
            # Until all that is temporary has been removed, which is further out.
            self._ending.enter_context(uninterrupted())
            with contextlib.ExitStack() as end:
                end.callback(end_descendants, self._end)
                end.callback(parts.close)
                self._settle()
                if not self._write_results(output, status) and code == 0:
                    status, code = "failed", 1
                _logger.info("Run finished: %s", kv(status=status, run_dir=output.path))
        return code

    def _run(self, output: RunOutput, parts: contextlib.ExitStack) -> None:
        """Start and train; what `parts` takes up is stopped after the run's outcome was told."""
        _warn(self._plan)
        self._tell_resumption()
        cluster = self._config.cluster
        host = None if cluster.ray_address is None else _own_address()
        parts.enter_context(
            ray_session(cluster, self._plan.device, self._plan.slots, self._directory, self._end)
        )
        log_server = parts.enter_context(contextlib.closing(LogServer(new_key(), host)))
        settings = ProcessSettings(str(output.path / "logs"), log_server.address)
        self._system = RLSystem(self._plan, settings)
        parts.callback(self._stop)
        self._system.start(output, run_id=secrets.token_hex(8))
        self._loop(output)

    def _tell_resumption(self) -> None:
        resumption = self._resumption
        if resumption is None:
            if self._config.trainer.resume is not None:
                _logger.info("Nothing to resume: a new run begins.")
            return
        for skipped in resumption.skipped:
            _logger.warning("Checkpoint skipped: %s", kv(path=skipped.path, why=skipped.why))
        state, epoch = resumption.state, self._beginning.epoch
        _logger.info(
            "Run resumed: %s",
            kv(checkpoint=resumption.checkpoint, step=state.step, run_epoch=epoch),
        )

    def _stop(self) -> None:
        """Stop the parts in an orderly way, if Ray still runs; the rest is killed afterwards.

        A signal to the whole process group, as a terminal sends it, may have ended Ray already.
        """
        _logger.info("Shutting down actors.")
        if self._config.cluster.ray_address is not None or is_running("gcs_server"):
            bounded(self._system.shutdown, self._end.at_most(_STOP_S), "shutdown")

    def _loop(self, output: RunOutput) -> None:
        if self._config.trainer.mock:
            run_mock_loop(self._config, self._system)
            return
        self._trainer = self._make_trainer(output)
        self._trainer.on_progress = self._view.update
        self._trainer.fit()

    def _make_trainer(self, output: RunOutput) -> Trainer:
        parts = (self._config, self._data, output, self._system)
        if self._recorded is not None:
            return TrainOnlyTrainer(*parts, self._recorded)
        if self._config.debug.rollout_only:
            return RolloutOnlyTrainer(*parts)
        return Trainer(*parts, self._beginning)

    def _settle(self) -> None:
        """After a failure, too, what is nearly written is worth a moment."""
        trainer = getattr(self, "_trainer", None)
        limit = self._end.at_most(_SETTLE_S)
        if trainer is not None:
            bounded(lambda: trainer.settle(limit), limit, "settle")

    def _write_results(self, output: RunOutput, status: str) -> bool:
        """Summary and reward curve; whether the summary is written."""
        trainer = getattr(self, "_trainer", None)
        evaluations = trainer.evaluations if trainer is not None else []
        summary = self._summary(output, status, evaluations)
        written = _written("summary", lambda: output.write_summary(summary))
        if output.rewards:
            points = [(item.step, item.reward) for item in evaluations]
            _written("reward curve", lambda: output.plot_rewards(points))
        return written

    def _summary(
        self, output: RunOutput, status: str, evaluations: Sequence[Evaluation]
    ) -> dict[str, Any]:
        sync = getattr(getattr(self, "_system", None), "weight_sync", None)
        summary = {
            "status": status,
            "mode": self._config.cluster.mode,
            "rollout": self._config.rollout.name,
            "steps": len(output.rewards),
            "seconds": round(time.monotonic() - self._started, 3),
            "reward": output.reward_summary(),
            "peak_memory_pss_bytes": self._memory.peak_bytes,
            "syncs": sync.records if sync is not None else [],
        }
        if evaluations:
            summary["eval"] = {"first": evaluations[0], "last": evaluations[-1]}
        return summary


def _written(what: str, write: Callable[[], object]) -> bool:
    """Whether that could be written; a full disk is told, not raised."""
    try:
        write()
    except OSError as error:
        _logger.error("The %s is not written: %s", what, in_one_line(error))  # noqa: TRY400
        return False
    return True


def _recorded(plan: RunPlan) -> RecordedSamples | None:
    """What `debug.train_only` names, checked."""
    config = plan.config
    if config.debug.train_only is None:
        return None
    samples = config.data.train_batch_size * config.data.num_generations
    path = Path(config.debug.train_only)
    return RecordedSamples(path, samples, vocab_size(plan.model_path))


def _warn(plan: RunPlan) -> None:
    unused = unused_accelerator() if plan.config.cluster.device == "auto" else None
    if unused is not None:
        _logger.warning("Everything runs on the CPU: %s; %s", unused, REMEDY)
    lr = plan.config.actor.optimizer_config.lr
    if lr > _HIGH_LR and not plan.embedded_model:
        _logger.warning(
            "actor.optimizer_config.lr=%g is high for %s; 1e-6 to 2e-5 is usual",
            lr,
            plan.model_path,
        )


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
