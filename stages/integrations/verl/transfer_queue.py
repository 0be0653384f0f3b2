"""`TransferQueue`: rows of groups into verl's TransferQueue, and verl's removals from it.

verl's trainer has one client of TransferQueue a process, behind functions of the package. Its functions to remove keys
and to end are replaced by ones that report: the only sign of what verl has trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..interface import module_with
from .rows import Row

PARTITION = "train"


class TransferQueue:
    """The TransferQueue of verl's trainer in this process. Its methods may be called in any thread."""

    def __init__(self) -> None:
        """Use the client that verl has initialized.

        Raises:
            MissingExtra: verl is not installed.
            MissingInterface: TransferQueue or verl lacks a function.
        """
        self._functions = module_with("verl", "transfer_queue", "kv_put", "kv_batch_put", "kv_clear", "close")
        self._tensordict = module_with("verl", "verl.utils.tensordict_utils", "list_of_dict_to_tensordict")
        self._torch = module_with("verl", "torch", "from_numpy")
        self._replaced: dict[str, Any] = {}

    def put(self, uid: str, step: int, rows: Sequence[Row], *, name_rows: bool) -> None:
        """Write the rows of a prompt's group, and then that the prompt is finished.

        Args:
            uid: of the prompt.
            step: of verl, that asked for it.
            rows: of the group.
            name_rows: whether the field `uid` of a row is its key: the advantage estimator finds it by that.
        """
        keys = [f"{uid}_{session}_0" for session in range(len(rows))]
        fields = [
            {
                **{name: self._torch.from_numpy(column) for name, column in row.columns.items()},
                **row.values,
                "uid": key if name_rows else uid,
                "session_id": session,
                "global_steps": step,
            }
            for session, (key, row) in enumerate(zip(keys, rows, strict=True))
        ]
        self._functions.kv_batch_put(
            keys=keys,
            partition_id=PARTITION,
            fields=self._tensordict.list_of_dict_to_tensordict(fields),
            tags=[{**row.tag, "global_steps": step} for row in rows],
        )

    def finish(self, uid: str, step: int) -> None:
        """Write that the group of a prompt is whole, and that verl counts its age from `step`."""
        self._functions.kv_put(key=uid, partition_id=PARTITION, tag={"status": "finished", "global_steps": step})

    def fail(self, uids: list[str]) -> None:
        """Write that these prompts get no group."""
        if uids:
            tags = [{"status": "failure"} for _ in uids]
            self._functions.kv_batch_put(keys=uids, partition_id=PARTITION, tags=tags)

    def report(self, cleared: Callable[[list[str]], None], closing: Callable[[], None]) -> None:
        """Call `cleared` with the keys that verl has removed, and `closing` before it closes TransferQueue."""
        clear, close = self._functions.kv_clear, self._functions.close

        def kv_clear(keys: list[str] | str, partition_id: str) -> None:
            clear(keys=keys, partition_id=partition_id)
            if partition_id == PARTITION:
                cleared([keys] if isinstance(keys, str) else list(keys))

        def closes() -> None:
            try:
                closing()
            finally:
                close()

        self._replaced = {"kv_clear": clear, "close": close}
        self._functions.kv_clear, self._functions.close = kv_clear, closes

    def stop_reporting(self) -> None:
        """Give verl its own functions back."""
        for name, function in self._replaced.items():
            setattr(self._functions, name, function)
        self._replaced = {}
