"""A training that prints the processes of its samplers after two steps, and goes on until it is killed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

if __name__ == "__main__":
    import pytest
    from tests.trl_real.against_trl import At, samplers
    from tests.trl_real.conftest import make_trainer
    from tests.trl_real.letters import flow_of, publisher_of

    from penstock.integrations.trl import TRLWorker

    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    publisher = publisher_of(model)
    worker = TRLWorker(lambda: flow_of(model, publisher.url, workers=1))
    with pytest.MonkeyPatch.context() as patch:
        make = make_trainer.__wrapped__(model, folder, patch)  # type: ignore[attr-defined]
        show = At(2, lambda: print(*samplers(), flush=True))  # noqa: T201 (read by the test)
        make(worker, publisher, max_steps=100_000, callbacks=[show]).train()
