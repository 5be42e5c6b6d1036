"""Signals that ask a run to end: Ctrl-C, SIGTERM (as service managers send) and SIGHUP (of a terminal that is closed).

The first one ends the measurements by an exception; at any other time it waits until there are measurements again, or
all is stored. A second one is not kept waiting. Handlers are set in the main thread alone, and only where a signal
would end the process or raise KeyboardInterrupt: what a program ignores or handles by itself stays as it is.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
USUAL = (signal.SIG_DFL, signal.default_int_handler)


class Interrupted(KeyboardInterrupt):
    """A signal asks the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interrupts:
    """From entry to exit, signals that ask to end are kept back, but for what is `released`: there they raise."""

    def __init__(self) -> None:
        self.number = 0  # of the first signal that came
        self._held = 1
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in ASKED:
                if (handler := signal.getsignal(number)) in USUAL:
                    self._before[number] = handler
                    signal.signal(number, self._came)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def _came(self, number: int, _frame: FrameType | None) -> None:
        again, self.number = bool(self.number), self.number or number
        if again or not self._held:
            raise Interrupted(number)

    @contextmanager
    def released(self) -> Iterator[None]:
        """A signal ends what is done in here by `Interrupted`, and one that came before does so at once."""
        self._held -= 1
        try:
            if self.number:
                raise Interrupted(self.number)
            yield
        finally:
            self._held += 1

    @contextmanager
    def held(self) -> Iterator[None]:
        """A part of what is released that is done to its end: a signal is raised only then."""
        before = self.number
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self.number and not before and not self._held:
            raise Interrupted(self.number)

    def send_again(self) -> None:
        """After `__exit__`, let a signal that ends a process do so, now that everything is stored. Ctrl-C, which a
        program may want to live on after, is not sent."""
        if self.number and self.number != signal.SIGINT:
            signal.raise_signal(self.number)
