#!/usr/bin/env bash
# First contact with an accelerator that nobody of us has: runs what should work, writes down what did.
#
#   bash tools/npu_smoke.sh MODEL [cpu|npu|cuda]
#
# MODEL is a Hugging Face directory of a small model (0.5B will do). In the environment of the engine,
# with our packages installed beside it (README, "With an accelerator"). Everything goes to
# npu_smoke_<time>.tar.gz, which holds logs, configurations and reports, no weights; send it back
# with an issue. Each step has a deadline; one that fails does not stop the next.
set -uo pipefail
model=${1:?usage: npu_smoke.sh MODEL [cpu|npu|cuda]}
device=${2:-npu}
seconds=${SMOKE_TIMEOUT_S:-900}
out=$PWD/npu_smoke_$(date +%Y%m%d_%H%M%S)
mkdir -p "$out"

step() {
    local name=$1 code
    shift
    timeout -k 60 "$seconds" "$@" >"$out/$name.log" 2>&1
    code=$?
    echo "$name: exit code $code" | tee -a "$out/steps.txt"
}

run() {
    local name=$1
    shift
    step "$name" python -m minirl.main "cluster.device=$device" "actor.model_config.local_path=$model" \
        trainer.mock=true checkpoint_engine.debug.verify_light_transfer=true \
        "trainer.run_dir=$out/run_$name" "$@"
    # Weights stay here.
    rm -rf "$out/run_$name/checkpoints" "$out/exchange"
}

[ "$device" = npu ] && step npu_smi npu-smi info
[ "$device" = cuda ] && step nvidia_smi nvidia-smi
step packages python -c "
from importlib.metadata import distributions
print(*sorted({f'{item.name}=={item.version}' for item in distributions()}), sep='\\n')"
step doctor python -m minirl.main doctor
step torch python -c "
import torch
module = getattr(torch, '$device')
print(torch.__version__, module.is_available(), module.device_count())"
engines=${SMOKE_ENGINES:-$(python -c "
import importlib.util as util
print(' '.join(name for name in ('vllm', 'sglang') if util.find_spec(name)))")}
for engine in $engines; do
    run "fused_$engine" "rollout.name=$engine" \
        checkpoint_engine.debug.verify_live_weights=true "checkpoint_engine.root_dir=$out"
    for backend in ${SMOKE_BACKENDS:-hccl mooncake disk}; do
        run "${backend}_$engine" config=separate "rollout.name=$engine" \
            "checkpoint_engine.backend=$backend" "checkpoint_engine.root_dir=$out/exchange"
    done
done
tar -C "$(dirname "$out")" -czf "$out.tar.gz" "$(basename "$out")"
echo "written: $out.tar.gz"
! grep -qv "exit code 0" "$out/steps.txt"
