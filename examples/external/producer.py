"""A rollout job for Vime in one file, for you to copy: it imports nothing of Vime, it speaks docs/producer-protocol.md.

    pip install httpx torch transformers safetensors
    VIME_TOKEN=... python producer.py http://HOST:PORT --model DIR       # DIR: config and tokenizer of the run's model

A token is one producer: give a second process a token of its own. SIGTERM gives the leases back. Replace `reward`, and
`Policy` by a faster engine, as long as `log_probs` are those of the distribution that was sampled from.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
import time
import uuid

import httpx
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def reward(completion: str, label: object, is_complete: bool) -> float:
    """1.0 when the completion ended by itself, and its text after the last </think> is the label."""
    return float(is_complete and completion.rpartition("</think>")[2].strip() == str(label).strip())


class Gateway(httpx.Client):
    loaded: dict  # the last report of weights: a gateway that was started again asks for it

    class GoneError(Exception): ...  # the lease or the weights of the call, or a file arrived broken

    def call(self, method: str, path: str, body: dict | None = None, *, away_s: float = 300.0, sha256: str = ""):
        """Return the response's message, or the bytes of a file with that `sha256`. Every call may be repeated as it
        was, and counts once: it is, until a response arrives. None for `away_s` ends the job, as a refusal does."""
        responded, wait_s = time.monotonic(), 1.0
        while True:
            try:
                response = self.request(method, path, json=body)
                if response.status_code == 200:
                    if sha256 and hashlib.sha256(response.content).hexdigest() != sha256:
                        raise self.GoneError("other bytes than the manifest says")
                    return response.content if sha256 else response.json() | {}
                error = response.json()
                if error["code"] in ("lease_lost", "unknown_lease", "unknown_version", "unknown_file"):
                    raise self.GoneError(error["code"])
                if error["code"] == "unconfirmed_version":
                    self.call("POST", "/v1/weights/loaded", self.loaded)
                elif not error["may_repeat"]:
                    raise SystemExit(response.text)
                wait_s, responded = float(response.headers.get("retry-after", 1)), time.monotonic()
            except (httpx.TransportError, ValueError, TypeError, KeyError, RecursionError) as failure:  # or no message
                if time.monotonic() - responded > away_s:
                    raise SystemExit(f"{method} {path}: no response within {away_s:g} s: {failure!r}") from None
            time.sleep(wait_s)


class Policy:
    """The run's model in transformers; `version` of its weights."""

    def __init__(self, directory: str) -> None:
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.version = -1

    def load(self, gateway: Gateway) -> None:
        """Load the weights that the run serves, and report the hash of what was loaded."""
        manifest, state = gateway.call("GET", "/v1/weights/serving"), {}
        for name, sha256 in ((file["name"], file["sha256"]) for file in manifest["files"]):
            content = gateway.call("GET", f"/v1/weights/{manifest['version']}/files/{name}", sha256=sha256)
            if name == "tensors.json":
                entries = json.loads(content)["tensors"]
            elif name.endswith(".safetensors"):
                state |= safetensors.torch.load(content)
        self.model.load_state_dict(state, strict=False, assign=True)
        self.model.tie_weights()
        loaded, digest = self.model.state_dict(), hashlib.blake2b(digest_size=16)
        given = {loaded[name].data_ptr() for name in state}
        assert all(tensor.data_ptr() in given for tensor in loaded.values()), "--model is not the run's model"
        for name, tensor in ((entry["name"], loaded[entry["name"]]) for entry in entries):
            dtype, shape = str(tensor.dtype).removeprefix("torch."), ",".join(map(str, tensor.shape))
            header = f"{name}\n{dtype}\n{shape}\n".encode()
            digest.update(len(header).to_bytes(4, "little") + header)
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        gateway.loaded = {"version": manifest["version"], "engines": {"transformers": digest.hexdigest()}}
        gateway.call("POST", "/v1/weights/loaded", gateway.loaded)
        self.version = manifest["version"]

    @torch.inference_mode()
    def generate(self, prompt: dict, most: int, temperature: float) -> list[dict]:
        """Return the prompt's samples, each of at most `most` tokens."""
        eos, cache, steps, samples = self.tokenizer.eos_token_id, None, [], []
        tokens_N1 = torch.tensor([prompt["tokens"]] * len(prompt["samples"]))
        for _ in range(most):
            out = self.model(tokens_N1, past_key_values=cache, use_cache=True)
            logp_NV, cache = (out.logits[:, -1].float() / temperature).log_softmax(-1), out.past_key_values
            tokens_N1 = torch.multinomial(logp_NV.exp(), 1)
            steps.append((tokens_N1, logp_NV.gather(1, tokens_N1)))
        tokens_NR, logp_NR = (torch.cat(part, dim=1).tolist() for part in zip(*steps, strict=True))
        for asked, tokens, logp in zip(prompt["samples"], tokens_NR, logp_NR, strict=True):
            length = tokens.index(eos) + 1 if (is_complete := eos in tokens) else most
            text = self.tokenizer.decode(tokens[:length], skip_special_tokens=True)
            sample = {"index": asked["index"], "tokens": prompt["tokens"] + tokens[:length], "response": text}
            sample |= {"response_length": length, "log_probs": logp[:length], "versions": [[0, length, self.version]]}
            sample |= {"reward": reward(text, prompt["label"], is_complete)}
            samples.append(sample | {"status": "completed" if is_complete else "truncated"})
        return samples


def beat(gateway: Gateway, every_s: float) -> None:
    while True:
        time.sleep(every_s)
        gateway.call("POST", "/v1/producers/heartbeat", {})


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate for a run of Vime.")
    parser.add_argument("address", nargs="?", default=os.environ.get("VIME_GATEWAY"), help="http://HOST:PORT")
    parser.add_argument("--token", default=os.environ.get("VIME_TOKEN", ""), help="(default: the variable VIME_TOKEN)")
    parser.add_argument("--model", required=True, metavar="DIR", help="config and tokenizer of the run's model")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, help="(default: the run's)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    policy, request, answer = Policy(args.model), uuid.uuid4().hex, {"lags": "the first weights", "is_exhausted": False}
    gateway = Gateway(base_url=args.address, headers={"authorization": f"Bearer {args.token}"}, timeout=60)
    run = gateway.call("POST", "/v1/producers/register", {"model": args.model, "engines": 1})
    threading.Thread(target=beat, args=(gateway, run["lease_timeout_s"] / 4), daemon=True).start()
    try:
        while not answer["is_exhausted"]:
            try:
                if answer["lags"]:
                    policy.load(gateway)
                answer = gateway.call("POST", "/v1/leases", {"request": request, "wait_s": 20})
                request = uuid.uuid4().hex if answer["prompts"] else request  # else it keeps its place in the line
                for prompt in answer["prompts"]:
                    samples = policy.generate(prompt, args.max_new_tokens, args.temperature or run["temperature"])
                    gateway.call("POST", "/v1/groups", {"lease": prompt["lease"], "samples": samples})
            except Gateway.GoneError as gone:  # go on with the weights and prompts that are there, or will be
                print(f"again: {gone}", file=sys.stderr)
                time.sleep(0.5)
    finally:
        gateway.call("POST", "/v1/producers/leave", {}, away_s=10)


if __name__ == "__main__":
    main()
