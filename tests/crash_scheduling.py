"""Distributes tests to workers, and continues after a worker has crashed.

A test that times out ends its worker: the package itself uses SIGALRM, so the timeout cannot.
"""

from __future__ import annotations

from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController


class CrashScheduling(LoadGroupScheduling):
    """``--dist loadgroup``; that of xdist 3.8 waits forever after a crash."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Queue the tests of a node again, except those that it ran; returns the one it died in."""
        units = self.assigned_work[node]
        self.assigned_work[node] = {}
        super().remove_node(node)
        pending = [(unit, test) for unit in units.values() for test in unit if not unit[test]]
        if not pending:
            return None
        unit, crashed = pending[0]
        unit[crashed] = True
        left = {name: each for name, each in units.items() if not all(each.values())}
        self.workqueue.update(left)
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        """Assign a second unit if needed: a worker runs a test only once it knows the next one."""
        if node not in self.registered_collections:
            return  # it replaces a node that has just died, and has not collected yet
        super()._reschedule(node)
        if not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)
