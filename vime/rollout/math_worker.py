"""Child process that decides mathematical equality: `python -m vime.rollout.math_worker`.

It is a process of its own, because math-verify limits its time with signal.alarm (main thread only) and because a
pathological expression must be killable. It reads one JSON object a line ({"gold", "answer"}) and writes one a line
({"score"}, null when `gold` says nothing). It ends when its standard input closes, so it never outlives its parent.
"""

from __future__ import annotations

import json
import logging
import re
import sys

from vime.rollout.rm_text import boxed

PARSE_SECONDS = 5


def judge(gold: str, answer: str) -> float | None:
    """Return 1.0 when the last expression of `answer` equals `gold`. No expression, or one too hard to decide, is
    0.0. None when `gold` holds no expression: no answer could be right."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    # \$ is the currency, and stands for no formula
    wrapped = gold if re.search(r"(?<!\\)\$", gold) or "\\boxed" in gold else f"${gold}$"
    try:
        expected = parse(wrapped, extraction_config=targets, parsing_timeout=PARSE_SECONDS, raise_on_error=True)
    except TimeoutException:
        return 0.0
    except Exception:  # boundary: a label may break the parser in any way; it cannot be read
        return None
    if not expected:
        return None
    answers, last = [answer], boxed(answer)
    if last is not None and answer.count("boxed") > 1:  # math-verify makes one set of neighbouring boxes
        answers.append(f"\\boxed{{{last}}}")
    try:
        return float(
            any(
                verify(expected, given, timeout_seconds=PARSE_SECONDS)
                for text in answers
                if (given := parse(text, extraction_config=targets, parsing_timeout=PARSE_SECONDS))
            )
        )
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
