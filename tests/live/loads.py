"""Requests at a constant rate, beside a test."""

import threading

from waiting import PATIENCE_S

from ray_slo.core import DropReason
from ray_slo.errors import SLOError

MAY_BE = {reason.value for reason in DropReason} | {"queue_full", "expired"}
"""Outcomes of requests beside "ok" if there are more than can be served in time."""


class Load:
    """Sends requests until the end of the block, then waits for all answers.

    Args:
        send: sends request number n, and returns its response.
        gap_s: time between two requests, seconds.
        is_right: whether an answer is that of request number n.

    Attributes:
        sent: number of requests so far.
        answers: after the block, what each request got: a result or an error.
        outcomes: the same as "ok", the reason of a refusal, or the text of what should not be.
    """

    def __init__(self, send, gap_s, is_right=lambda n, answer: True):
        self._send, self._gap_s, self._is_right = send, gap_s, is_right
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.sent, self.answers, self.outcomes = 0, [], []

    def _run(self):
        responses = []
        while not self._stop.wait(self._gap_s):
            responses.append(self._send(self.sent))
            self.sent += 1
        for n, response in enumerate(responses):
            try:
                answer = response.result(timeout_s=PATIENCE_S)
                outcome = "ok" if self._is_right(n, answer) else repr(answer)
            except SLOError as error:
                answer, outcome = error, error.reason
            except Exception as error:
                answer, outcome = error, repr(error)
            self.answers.append(answer)
            self.outcomes.append(outcome)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        assert len(self.outcomes) == self.sent
