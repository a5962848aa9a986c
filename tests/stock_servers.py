"""Inference servers as anybody starts them: a command, not a replica of ours."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from shared_memory import mapped_segments

START_S = 240
STOP_S = 20
LOG_CHARACTERS = 4000
SUPERVISED = (
    "import os, sys; from rl_core.testing.process_tree import supervise; "
    "supervise(int(sys.argv[1])); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)
"""Has all processes of a server end with it, and with the test run."""

VLLM = (
    ("--skip-tokenizer-init", "--enforce-eager", "--max-num-seqs", "8"),
    ("--kv-cache-memory-bytes", str(1 << 25), "--dtype", "float32"),
    ("--worker-extension-cls", "rl_rollout_vllm.worker_extension.RolloutWorkerExtension"),
    ("--middleware", "rl_rollout_vllm.live_route.VllmLiveRoute"),
)
VLLM_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
SGLANG = (
    ("--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle", "--dtype", "float32"),
    ("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    ("--grammar-backend", "none", "--disable-overlap-schedule", "--disable-cuda-graph"),
    ("--disable-custom-all-reduce", "--mem-fraction-static", "0.9"),
    ("--max-total-tokens", "2048", "--max-running-requests", "8"),
)


@contextlib.contextmanager
def stock_server(engine: str, model: Path, log: Path) -> Iterator[str]:
    """`host:port` of a vLLM or SGLang that serves `model`."""
    port = _free_port()
    where = ("--host", "127.0.0.1", "--port", str(port))
    if engine == "vllm":
        # `vllm serve` wants a distribution called vllm, which the CPU build is not.
        program = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(model))
        options, env, ready = VLLM, VLLM_ENV, "/health"
    else:
        program = ("-m", "sglang.launch_server", "--model-path", str(model))
        options, env, ready = SGLANG, {}, "/model_info"
    command = [*program, *where, *(item for items in options for item in items)]
    address = f"127.0.0.1:{port}"
    with _running(command, env, log) as process:
        _wait_for(f"http://{address}{ready}", process, log)
        yield address


def _free_port() -> int:
    """One that the system gives to nobody else until the server has come to bind it."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(first // 2, first)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextlib.contextmanager
def _running(
    command: Sequence[str], env: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    scratch = tempfile.mkdtemp(prefix="stock-")  # short: there are sockets in it
    common = {"TMPDIR": scratch, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISED, str(os.getpid()), *command],
            env={**os.environ, **common, **env},
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        _take_names_off_segments(process.pid)
        process.terminate()
        process.wait(STOP_S)
        shutil.rmtree(scratch, ignore_errors=True)


def _take_names_off_segments(pid: int) -> None:
    """Engines leave shared memory; unlinked while it is mapped, it goes with their processes."""
    children = psutil.Process(pid).children(recursive=True)
    for path in mapped_segments(process.pid for process in children):
        path.unlink(missing_ok=True)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise AssertionError(f"the server did not come up:\n{log.read_text()[-LOG_CHARACTERS:]}")
