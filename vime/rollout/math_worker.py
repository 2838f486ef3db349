"""Child process that decides mathematical equality: `python -m vime.rollout.math_worker`.

It is a process of its own, because math-verify limits its time with signal.alarm (main thread only) and because a
pathological expression must be killable. It reads one JSON object a line ({"gold", "answer"}) and writes one a line
({"score"}). It ends when its standard input closes, so it never outlives its parent.
"""

from __future__ import annotations

import json
import logging
import sys

PARSE_SECONDS = 5


def judge(gold: str, answer: str) -> float:
    """Return 1.0 when the last expression of `answer` equals `gold`. No expression, or one too hard to decide, is
    0.0."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    wrapped = gold if "$" in gold or "\\boxed" in gold else f"${gold}$"
    try:
        expected = parse(wrapped, extraction_config=targets, parsing_timeout=PARSE_SECONDS)
        given = parse(answer, extraction_config=targets, parsing_timeout=PARSE_SECONDS)
        return float(bool(expected and given and verify(expected, given, timeout_seconds=PARSE_SECONDS)))
    except Exception:  # boundary: a policy's answer may break the parser in any way; that is a wrong answer
        return 0.0


def main() -> None:
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        request = json.loads(line)
        sys.stdout.write(json.dumps({"score": judge(request["gold"], request["answer"])}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
