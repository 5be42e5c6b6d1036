"""Requests in the order of arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from pagedkern.scheduler.request import Request


class Queue:
    """Requests in the order of arrival, whatever the order in which they are added.

    Adding a request before all others or behind them, removing one from any place, and the first one: O(1). One that
    is added in the middle is sorted in when the order is next asked for: O(n log n), once for all of them.
    """

    __slots__ = ("_by_id", "_in_order")

    def __init__(self) -> None:
        self._by_id: OrderedDict[int, Request] = OrderedDict()  # ids are given in the order of arrival
        self._in_order = True

    def add(self, request: Request) -> None:
        """The request is not in the queue."""
        by_id, ident = self._by_id, request.id
        if not by_id or not self._in_order or ident > next(reversed(by_id)):
            by_id[ident] = request
        elif ident < next(iter(by_id)):
            by_id[ident] = request
            by_id.move_to_end(ident, last=False)
        else:
            by_id[ident] = request
            self._in_order = False

    def add_all(self, requests: list[Request]) -> None:
        """The requests are not in the queue, and come in the order of arrival."""
        by_id = self._by_id
        if requests and self._in_order and (not by_id or requests[0].id > next(reversed(by_id))):
            by_id.update([(request.id, request) for request in requests])
        else:
            for request in requests:
                self.add(request)

    def remove(self, request: Request) -> None:
        """The request is in the queue."""
        del self._by_id[request.id]

    def remove_all(self, requests: list[Request]) -> None:
        """The requests are in the queue."""
        by_id = self._by_id
        for request in requests:
            del by_id[request.id]

    @property
    def first(self) -> Request | None:
        """The one that arrived first, None of an empty queue."""
        return next(iter(self), None)

    def __iter__(self) -> Iterator[Request]:
        if not self._in_order:
            self._sort()
        return iter(self._by_id.values())

    def __reversed__(self) -> Iterator[Request]:
        if not self._in_order:
            self._sort()
        return reversed(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request: Request) -> bool:
        return self._by_id.get(request.id) is request

    def _sort(self) -> None:
        for ident in sorted(self._by_id):
            self._by_id.move_to_end(ident)
        self._in_order = True
