"""Every error that a caller of penstock may want to catch, one class a situation."""

from __future__ import annotations

import signal

import anyio

from .._schemas.errors import InvalidConfig as InvalidConfig
from .._schemas.errors import InvalidRecord as InvalidRecord
from .._schemas.errors import PenstockError as PenstockError
from .._schemas.errors import ProtocolMismatch as ProtocolMismatch
from .._schemas.errors import TokenizersDiffer as TokenizersDiffer


class RecordTooLarge(PenstockError):
    """A record needs more bytes than its channel will ever have."""


class ChannelFull(PenstockError, anyio.WouldBlock):
    """`send_nowait` found no credit: the receiver has not released enough of the records that were sent."""


class PeerLost(PenstockError, anyio.BrokenResourceError):
    """The process at the other end died without closing the channel; the message names it."""


class RecordCorrupted(PeerLost):
    """Received records differ from the sent ones, by their checksum; their sender was disconnected."""


class PeerClosed(PenstockError, anyio.BrokenResourceError):
    """The other end closed the channel: a record that is sent now would not be received."""


class SenderTimedOut(PeerClosed):
    """The receiver disconnected this sender, because it did not respond in time: its process was stopped, or hung."""


class SenderRejected(PeerClosed):
    """The receiver disconnected this sender for good: its messages were damaged, or it cannot be reached itself."""


class NobodyListens(PenstockError, ConnectionError):
    """There is no listener at a URL: no receiver of a channel, no publisher of weights, no inference server."""


class OutOfSharedMemory(PenstockError, MemoryError):
    """The machine cannot give the shared memory that a channel is configured to use."""


class OutOfFileDescriptors(PenstockError, OSError):
    """This process, or the machine, has fewer file descriptors left than are needed."""


class DiskFull(PenstockError, OSError):
    """A disk, a quota or the limit on the size of a file is exhausted; data written before stays whole."""


class NotWritable(PenstockError, OSError):
    """A folder cannot be written: its file system is read-only, or this user may not; the message names it."""


class CheckpointDamaged(PenstockError, OSError):
    """A file of a checkpoint is not as it was written; the message names it, and an earlier whole checkpoint."""


class FileDamaged(PenstockError, OSError):
    """A file that is needed cannot be read back as it was written; the message has its path and a remedy."""


class LockTimedOut(PenstockError, TimeoutError):
    """Another process has held a lock for longer than a bound; the message names it."""


class UnsafeLock(PenstockError, OSError):
    """The place of a lock is not this user's alone, or no file; the message names it."""


class MemberAbsent(PenstockError):
    """A sender that is counted by name did not connect, or did not reconnect, in `absence_timeout_s`."""


class MemberNameInUse(PenstockError):
    """Two senders are connected under one name, to a receiver that counts them by name."""


class MemberNameRequired(PenstockError):
    """A sender without a name connected to a receiver that counts senders by name."""


class TooManyMembers(PenstockError):
    """More names connected than a receiver counts senders; the message lists those that it knows."""


class TooManySenders(PenstockError):
    """The receiver's budget of bytes is divided among a fixed number of senders, and all have joined."""


class ReplayBufferFull(PenstockError):
    """A sender with replay may retain no more, and no checkpoint holds its records; the message says what to do."""


class IllegalTransition(PenstockError):
    """An operation on a slot that its state does not allow; the message holds the slot's history."""


class StaleDescriptor(PenstockError):
    """A descriptor or a release names a slot that was reused, or bytes outside the segment."""


class InvalidKey(PenstockError, ValueError):
    """A key is malformed, belongs to another user, or lies where others can read it."""


class KeyUnavailable(PenstockError, OSError):
    """The key that tcp channels on loopback share can be neither read nor made; the message names the file."""


class InvalidData(PenstockError, ValueError):
    """A file or a row of a data set is not what its reader expects; the message names the file, line or column."""


class UnstableTemplate(PenstockError, ValueError):
    """A chat template is not usable for several turns, or changes earlier ones; the message says what to do."""


class InvalidPipeline(PenstockError):
    """A chain cannot work as written; the message lists every problem, and says what to write instead."""


class StageFailed(PenstockError):
    """A stage raised; `__cause__` is the exception, and the message names the stage."""


class UserCodeExited(RuntimeError):
    """Code of a user raised an exception that ends tasks, threads or processes; the message has its type and text.

    CancelledError without a cancellation, SystemExit, KeyboardInterrupt without a signal, GeneratorExit, StopIteration:
    `__cause__` is the exception. Treated like any other error of that code.
    """


class RolloutsFailed(PenstockError):
    """So many rollouts in a row failed that the run ended; the message lists the most frequent reasons."""


class RewardFunctionFailed(PenstockError):
    """A reward function failed so many times in a row that the run ended; `__cause__` is its last exception."""


class CallProcessDied(PenstockError):
    """A process that computes rewards, or runs an agent, ended by itself or was not ready in time."""


class UnreadableScore(PenstockError, ValueError):
    """The response of a judge has no number where its `parse` expects one; the message has the response."""


class MissingColumn(PenstockError):
    """A reward function takes a column that the data does not have; the message lists the columns that it has."""


class RecordsSwallowed(PenstockError):
    """Stages received records and neither sent nor dropped them; the message names the stages."""


class NothingTrained(PenstockError):
    """A run ended by itself without training, or cannot learn; the message says how its trajectories ended."""


class FlowEnded(PenstockError):
    """A foreign trainer waits for trajectories of a flow that has ended, or was stopped."""


class FlowStalled(PenstockError, TimeoutError):
    """A flow has not sent to a foreign trainer for as long as that one waits; the message says what it waits for."""


class MissingInterface(PenstockError):
    """A framework lacks an interface that its integration uses; the message names both."""


class ClusterUnreachable(PenstockError, ConnectionError):
    """No Ray cluster answers at an address."""


class ClusterLost(StageFailed):
    """The head of a Ray cluster was lost during a run; the message has its address."""


class WorkerRefused(PenstockError):
    """A pipeline has no place for a worker that wants to join it; the message says why."""


class PlacementTimedOut(PenstockError, TimeoutError):
    """A Ray cluster did not reserve the places of a stage's workers; the message has a table: asked, free, by node."""


class WorkerFailed(StageFailed):
    """A stage raised in a worker; the message contains its traceback, unless it raised an error of penstock."""


class WorkerCutOff(PenstockError):
    """The host of a worker that has joined does not reach a server of its stage, such as that of the weights."""


class WorkersAbsent(StageFailed):
    """No worker was there for too long, of a stage whose workers join."""


class EngineFailed(PenstockError):
    """An engine failed at a valid request in every attempt; the message says how."""


class LogitsNotFinite(PenstockError, FloatingPointError):
    """A model computed logits that no token can be drawn from; the message has the version of its weights."""


class EngineTimedOut(PenstockError, TimeoutError):
    """An engine exceeded its timeout in every attempt; the message gives the timeout."""


class EngineRefused(PenstockError):
    """An engine rejected a request that it cannot serve, or cannot serve now; the message says why."""


class ServerFailed(PenstockError):
    """A server from outside could not be started, was not ready in time, or ended; the message ends with its log."""

    server: str = ""
    """Its name."""
    exit_code: int | None = None
    """That of its process, negative for a signal; None where that has not ended."""
    was_ready: bool = False
    """True if it had started, so that another one may start in its place."""


class JournalFull(PenstockError, OSError):
    """A journal may hold no more bytes, or its disk has no room for them; the message says what to do."""


class JournalInUse(PenstockError):
    """Another process writes to the journal; the message names it."""


class RunInUse(PenstockError):
    """Another process runs in the folder of a run."""


class RunDiffers(PenstockError):
    """A run is continued with other data, or another fixed fact; the message has each key with both values."""


class StepsOfAnotherRun(PenstockError):
    """The folder of an outside trainer has steps that this run has not done: they would count as done by it."""


class TrainerSilent(PenstockError, TimeoutError):
    """An outside trainer has not finished a step, or not begun, within a bound; the message says where to look."""


class RunStopped(SystemExit):
    """SIGTERM, SIGINT or SIGHUP has stopped a run gracefully; ends the script with exit code 143, 130 or 129."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(128 + by)
        self.by = by

    def __str__(self) -> str:
        return f"the run was stopped by {self.by.name}"


class NoSamples(PenstockError, LookupError):
    """A run has written no samples, or none of the requested step."""


class NoRecording(PenstockError, LookupError):
    """A run has kept no batches, or not those from its first step on."""


class NoMetrics(PenstockError, LookupError):
    """Runs have no metrics, or none of the requested names."""


class NoView(PenstockError, LookupError):
    """A folder holds no run that can be watched."""


class LedgerImbalance(PenstockError):
    """A trajectory ended twice, or ended without having been admitted."""


class WeightsMismatch(PenstockError):
    """Published weights do not fit the model; the message lists every tensor, expected and found."""


class WeightsDamaged(PenstockError, OSError):
    """Weights in files are torn, absent or altered; the message names the file and the damage."""


class WeightsInUse(PenstockError):
    """Another publisher writes into a folder of weights."""


class StaleHandle(PenstockError):
    """A handle refers to weights of a publisher that died, or of another publisher."""


class NoDevice(PenstockError):
    """Weights are to be published on a device that this process cannot use."""


class MissingExtra(PenstockError, ImportError):
    """An optional dependency is absent; the message gives the `pip install` command for it."""


def _name_publicly() -> None:
    """Name the public module of these classes: tracebacks show it."""
    root = __name__.partition(".")[0]
    for each in list(globals().values()):
        if isinstance(each, type) and issubclass(each, BaseException) and each.__module__.startswith(f"{root}."):
            each.__module__ = f"{root}.errors"


_name_publicly()
