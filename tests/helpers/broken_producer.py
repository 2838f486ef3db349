"""A producer in the standard library, right or with one fault by name, for the judge of `vime conformance --producer`:
`python broken_producer.py FAULT`."""

import contextlib
import http.client
import json
import os
import sys
import threading
import time
import urllib.parse
import uuid

FAULT = sys.argv[1]
PARTS = urllib.parse.urlsplit(os.environ["VIME_GATEWAY"])
HEADERS = {"authorization": f"Bearer {os.environ['VIME_TOKEN']}", "content-type": "application/json"}
GONE = ("lease_lost", "unknown_lease")


class GoneError(Exception):
    pass


def once(method, path, body):
    """Return (status, wait in seconds, message); ConnectionError without a response."""
    connection = http.client.HTTPConnection(PARTS.hostname, PARTS.port, timeout=60)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), HEADERS)
        response = connection.getresponse()
        message = json.loads(response.read()) | {}  # TypeError: JSON, but no message
        if response.status != 200 and "code" not in message:
            raise ValueError("the error of a proxy, not of the gateway")
        return response.status, float(response.headers.get("retry-after", 1)), message
    except (http.client.HTTPException, OSError, ValueError, TypeError, RecursionError) as error:
        raise ConnectionError(str(error)) from error
    finally:
        connection.close()


def call(method, path, body=None):
    while True:
        try:
            status, wait_s, message = once(method, path, body)
        except ConnectionError as error:
            if (
                FAULT == "trusting"
                and path == "/v1/groups"
                and not isinstance(error.__cause__, OSError | http.client.HTTPException)
            ):
                return {}  # "it has status 200"
            if FAULT == "other-request" and path == "/v1/leases":
                body = {**body, "request": uuid.uuid4().hex}
            if FAULT == "no-repeat" and path == "/v1/groups":
                raise GoneError from None
            if FAULT == "other-content" and path == "/v1/groups":
                body["samples"][0]["reward"] += 1.0
            time.sleep(1)
            continue
        if status == 200:
            return message
        if message["code"] == "unconfirmed_version":
            if FAULT == "never-reports-again":
                raise GoneError
            report(VERSION[0])
        elif message["code"] in GONE and FAULT == "repeats-for-ever":
            for _ in range(5):
                once(method, path, body)
            raise GoneError
        elif message["code"] in GONE:
            raise GoneError
        elif not message["may_repeat"]:
            if FAULT not in ("wrong-hash", "split"):
                raise SystemExit(f"{path}: {message}")
            raise GoneError
        time.sleep(0 if FAULT == "impatient" else wait_s)


VERSION = [-1]


def report(version):
    found = call("GET", f"/v1/weights/{version}")["content_hash"]
    engines = {"a": "0" * 32 if FAULT == "wrong-hash" and version == 1 else found}
    call("POST", "/v1/weights/loaded", {"version": version, "engines": engines})
    VERSION[0] = version


def samples(prompt):
    version = 0 if FAULT == "old-version" else VERSION[0]
    made = [
        {
            "index": sample["index"], "tokens": [*prompt["tokens"], 8], "response_length": 1, "log_probs": [-1.0],
            "versions": [[0, 1, version]], "reward": 0.0,
        }
        for sample in prompt["samples"]
    ]  # fmt: skip
    return made[:-1] if FAULT == "split" else made


OWN = []


def put_own(prompt):
    """A group for a prompt of its own, always under the same key. The first prompt that it leased gives its place to
    it: the script has a slot for each group."""
    made = [sample | {"index": place, "reward": float(len(OWN))} for place, sample in enumerate(samples(prompt))]
    OWN.append(prompt)
    with contextlib.suppress(GoneError, SystemExit):
        call("POST", "/v1/groups/own", {"key": "mine", "prompt": "mine", "samples": made})


def main():
    facts = {} if FAULT == "not-registered" else call("POST", "/v1/producers/register", {})

    def beat():
        while True:
            time.sleep(facts.get("lease_timeout_s", 5.0) / 4)
            call("POST", "/v1/producers/heartbeat", {})

    if FAULT != "no-heartbeat":
        threading.Thread(target=beat, daemon=True).start()
    serving = call("GET", "/v1/weights/serving")["version"]
    while True:
        try:
            if serving > VERSION[0]:
                report(serving)
            answer = call("POST", "/v1/leases", {"request": uuid.uuid4().hex, "wait_s": 2})
            serving = answer["serving"]
            for prompt in answer["prompts"]:
                if FAULT == "own-key-twice" or (FAULT == "none" and not OWN):
                    put_own(prompt)
                call("POST", "/v1/groups", {"lease": prompt["lease"], "samples": samples(prompt)})
            if answer["is_exhausted"]:
                break
        except GoneError:
            pass
    if FAULT != "no-leave":
        call("POST", "/v1/producers/leave", {})


main()
