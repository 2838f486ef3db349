# Qwen3-30B-A3B. The architecture is read from the HF config; this file holds what a launch script may want to know of it.
MODEL_NAME=Qwen3-30B-A3B
MODEL_ARGS=(--hf-checkpoint "$(realpath -m "${MODEL_DIR:-models}")/$MODEL_NAME")
