"""Pool: the replicas of a loaded model, grown and shrunk to the number of its knobs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.backends.base import BackendStats, LoadedModel, LoadProgress
from engine.config import AdapterSpec, EngineConfig, ModelSpec
from engine.errors import ErrorInfo, InvalidRequest, NodeGone, from_info
from engine.metrics.alerts import LESS_MEMORY, advice_after_death, cause_of_death
from engine.placement.plan import Placement
from engine.requests.request import Request
from engine.scheduling.queue import Slot
from engine.system.tasks import run_detached
from engine.worker_process.protocol import StepBatch
from engine.workers.desired_state import ModelDesiredState
from engine.workers.health import Backoff
from engine.workers.replica import Replica

if TYPE_CHECKING:
    from engine.models.deployment import Deployment

_log = logging.getLogger("engine")


@dataclass(frozen=True, slots=True)
class _Death:
    """A worker's last death, until it is back. at: the loop's clock; alert: its id; requeued: a sentence."""

    at: float
    alert: int
    requeued: str


@dataclass(frozen=True, slots=True)
class _Stall:
    """A worker that makes no step. alert: its id; lasts_s: until now."""

    alert: int
    lasts_s: float


def _tier_problem(stats: BackendStats) -> str:
    return next((tier.problem for tier in stats.kv_tiers if tier.problem), "")


class Pool:
    """Replicas by worker id, oldest first. It is the owner that each replica reports to.

    spec: of its deployment's model, as workers load it.
    """

    def __init__(self, deployment: Deployment, spec: ModelSpec) -> None:
        self._deployment = deployment
        self._models = deployment.models
        self._desired = ModelDesiredState(spec, deployment.config)
        self._router = deployment.model_queue.dispatcher.router
        self._replicas: dict[str, Replica] = {}
        self._unnoted: dict[str, Placement] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._deaths: dict[str, _Death] = {}
        self._stalls: dict[str, _Stall] = {}
        self._slow_disk: int | None = None
        self._first: asyncio.Future[LoadedModel] = asyncio.get_running_loop().create_future()

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __getitem__(self, worker_id: str) -> Replica:
        return self._replicas[worker_id]

    # -- commands -----------------------------------------------------------------------------------------------

    async def first_ready(self) -> LoadedModel:
        """Wait until one replica is ready; raises the first one's error once all of them have failed."""
        return await asyncio.shield(self._first)

    def all_dead(self) -> ErrorInfo | None:
        """The last reason why no worker is left that could answer; None while there is one."""
        if any(replica.state not in ("failed", "stopping") for replica in self):
            return None
        return next((replica.last_error for replica in self if replica.last_error is not None), None)

    def _staying(self) -> list[Replica]:
        """Replicas that are to stay, oldest first."""
        return [replica for replica in self if replica.state not in ("draining", "stopping")]

    def is_settled(self, config: EngineConfig) -> bool:
        """Return whether the workers are as the knobs say."""
        as_many = len(self._replicas) == config.num_workers and all(replica.state == "ready" for replica in self)
        return as_many and all(len(replica.active) <= config.max_prompts for replica in self)

    def grow(self, placements: Sequence[Placement]) -> None:
        """Start a replica for each placement, in the background; none once `stop` was called."""
        total, config = len(self._models.replicas()) + len(placements), self._deployment.config
        for placement in () if self._stopped else placements:
            worker_id = self._models.new_worker_id()
            replica = Replica(
                worker_id,
                self._desired.load(placement, total, secrets.token_hex(8) if self._models.keeps_memory else ""),
                device=placement.device,
                new_host=self._models.new_host,
                owner=self,
                backoff=Backoff(config.restart_backoff_s, config.max_restart_backoff_s),
                max_deaths=config.max_deaths,
                hang_s=config.hang_s,
            )
            self._replicas[worker_id] = replica
            self._unnoted[worker_id] = placement
            replica.start()

    def reconfigure(self, before: EngineConfig, config: EngineConfig, placements: Sequence[Placement] | None) -> None:
        """Take new knobs. placements: of missing workers; None leaves the workers as they are."""
        desired = self._desired
        if config.max_prompts != before.max_prompts:
            desired.max_prompts = config.max_prompts
            for replica in self:
                replica.desired.set_max_prompts(config.max_prompts)
        if config.step_tokens != before.step_tokens:
            desired.step_tokens = config.step_tokens
            for replica in self:
                replica.desired.set_step_tokens(config.step_tokens)
        if config.slo_itl_s != before.slo_itl_s:
            desired.itl_target_s = config.slo_itl_s
            for replica in self:
                replica.desired.set_itl_target(config.slo_itl_s)
        if config.threads != before.threads:
            desired.threads = config.threads
            self.share_cores()
        if placements is not None:
            self._resize(config.num_workers, placements)

    def drain_worker(self, worker_id: str) -> bool:
        """Let one worker finish what it has and go; False where it goes already.

        Raises InvalidRequest where no worker would be left to answer.
        """
        leaving, staying = self._replicas[worker_id], self._staying()
        if leaving not in staying:
            return False
        others = [replica for replica in staying if replica is not leaving]
        if not others or (leaving.state != "failed" and all(replica.state == "failed" for replica in others)):
            raise InvalidRequest(
                f"{worker_id} is the last worker of {self._deployment.spec.name}: unload the model instead",
                param="worker",
            )
        self._shed(leaving)
        return True

    def _resize(self, workers: int, placements: Sequence[Placement]) -> None:
        """Be `workers` many: failed ones go, draining ones stay rather than new ones are started at `placements`; the
        youngest go first."""
        for replica in [replica for replica in self if replica.state == "failed"]:
            self._leave(replica)
        staying = self._staying()
        for replica in staying[workers:]:
            self._shed(replica)
        missing = max(0, workers - len(staying))
        draining = [replica for replica in self if replica.state == "draining"][:missing]
        if missing:
            for replica in draining:
                replica.undrain()
            self.grow(placements[: missing - len(draining)])

    def _shed(self, replica: Replica) -> None:
        """Let go of one: a ready one takes nothing new and stops when empty, others stop now."""
        if replica.state == "ready":
            replica.drain()
        elif replica.state not in ("draining", "stopping"):
            self._leave(replica)

    def slots(self) -> list[Slot]:
        """The replicas that take requests, each as many as its memory allows; one that works on a quarantined request
        is full."""
        slots = []
        for replica in self:
            if replica.state == "ready":
                places = replica.places(self._desired.max_prompts)
                active = places if replica.is_quarantined else len(replica.active)
                slots.append(Slot(worker=replica.id, active=active, max_prompts=places))
        return slots

    def attach(self, adapter: AdapterSpec) -> None:
        """Give every replica the adapter, those to come included."""
        self._desired.adapters[adapter.key] = adapter
        for replica in self:
            replica.desired.attach(adapter)

    def detach(self, key: str) -> None:
        """Take the adapter from every replica."""
        self._desired.adapters.pop(key, None)
        for replica in self:
            replica.desired.detach(key)

    def release(self, request: Request) -> None:
        """A request leaves its worker, which stops computing it."""
        with contextlib.suppress(KeyError):  # stopped meanwhile
            replica = self._replicas[request.worker or ""]
            replica.forget(request)
            self.settle(replica)

    def settle(self, replica: Replica) -> None:
        """A place became free: a draining replica that is empty leaves."""
        if replica.state == "draining" and not replica.active:
            self._leave(replica)

    async def stop(self) -> None:
        """Stop every replica; returns when nothing of them is left."""
        self._stopped = True
        if not self._first.done():
            self._first.cancel()
        for replica in list(self):
            self._leave(replica)
        while self._leaving:
            await asyncio.wait(self._leaving)

    # -- reports of replicas ------------------------------------------------------------------------------------

    def placed(self, replica: Replica, spec: ModelSpec) -> ModelSpec:
        """ReplicaOwner: a worker whose devices went away with their machine starts on others."""
        placement = self._deployment.planner.relocate(spec, self._deployment.config, self._models.devices())
        if placement is None:
            return self._desired.restarted(spec)
        _log.warning("%s: moving to other devices", replica.id, extra={"source": replica.id})
        return self._desired.placed(placement)

    def replica_changed(self, replica: Replica) -> None:
        """ReplicaOwner: the first one ready ends `first_ready`; so does the last one's failure."""
        if replica.state == "ready" and replica.model is not None and not self._desired.follow(replica.model):
            _log.warning("%s: restarting, as its results differ from those of the model's other workers", replica.id)
            replica.restart()
            return
        if replica.state == "ready":
            self._note_return(replica)
        self._alert_slow_disk()
        if not self._first.done():
            if replica.model is not None:
                self._first.set_result(replica.model)
            elif all(each.state in ("failed", "stopping") for each in self):
                self._fail(each.last_error for each in self)
        self.settle(replica)
        self._deployment.workers_changed()

    def replica_stepped(self, replica: Replica, batch: StepBatch, before: BackendStats) -> None:
        """ReplicaOwner: outputs go to their requests."""
        if batch.stats.oom_steps > before.oom_steps:
            self._alert_oom(replica, batch, before)
        if batch.stats.kv_tiers:
            self._alert_tiers(replica, batch, before)
        self._deployment.model_queue.dispatcher.stepped(replica.id, batch)
        devices = [share.device for share in replica.shares]
        self._models.busy_time.add_steps(devices, ended=replica.step_ended_at, step_s=batch.steps * batch.step_s)
        if replica.model is not None and replica.id in self._unnoted:
            placement, load_s = self._unnoted.pop(replica.id), replica.load_s or 0.0
            planner, used = self._deployment.planner, replica.model.shares
            if not replica.restarts:  # else it may have mapped what another one left, in no time
                run_detached(planner.note(placement, used, batch.rss_bytes, load_s))
        self._models.tracker.stepped(replica, batch, before, self._deployment.spec.name)
        if self._deployment.model_queue.dispatcher.holds_back:
            self._deployment.dispatch()

    def replica_lost(self, replica: Replica, requests: list[Request], error: ErrorInfo) -> None:
        """ReplicaOwner: its requests go back to the queue. A draining one does not come back."""
        if error.code == NodeGone.code and replica.id in self._deaths:  # what it died of is said, and counted
            _log.info("%s", error.message, extra={"source": replica.id})
            self._deployment.workers_changed()
            return
        restarts = replica.state == "restarting"
        if restarts:
            self._models.meter.count("worker_restarts")
        follows = ("; restarting" if restarts else "") + (
            f"; {len(requests)} of its requests requeued" if requests else ""
        )
        _log.error("%s%s", error.message, follows, extra={"source": replica.id})
        self._end_stall(replica, "Its process was ended.")
        if replica.state == "failed":
            self._models.release_memory(replica.id)
        if replica.state in ("restarting", "failed", "draining"):
            self._alert_death(replica, len(requests), error)
        self._router.forget(replica.id)
        self._models.tracker.lost(replica.id, requests, error)
        self._deployment.workers_changed()

    def _alert_death(self, replica: Replica, requeued: int, error: ErrorInfo) -> None:
        """Say on every screen that a worker died; where none ever got ready, the model's failed load says it."""
        if not self._first.done() and self.all_dead() is not None:
            return
        follows = {
            "restarting": "Restarting.",
            "draining": "Not restarted, as it was draining.",
            "failed": "Not restarted. Restart it from its page (r).",
        }[replica.state]
        back = f" {requeued} of its requests requeued." if requeued else ""
        alert = self._models.alerts.add(
            cause_of_death(error), replica.id, error.message, done=follows + back, advice=advice_after_death(error)
        )
        self._deaths[replica.id] = _Death(asyncio.get_running_loop().time(), alert.id, back)

    def _note_return(self, replica: Replica) -> None:
        """A worker that died is ready again."""
        if (death := self._deaths.pop(replica.id, None)) is not None:
            took_s = asyncio.get_running_loop().time() - death.at
            _log.info("%s is ready again after %.1f s", replica.id, took_s, extra={"source": replica.id})
            self._models.alerts.add_done(death.alert, f"Restarted; ready again after {took_s:.1f} s.{death.requeued}")

    def _alert_oom(self, replica: Replica, batch: StepBatch, before: BackendStats) -> None:
        """Add an alert of steps that ran out of memory, with what became of their requests."""
        failed = sum(output.finish == "error" for output in batch.outputs)
        done = "Its steps are smaller from now on."
        if failed:
            done = f"{failed} of its requests failed."
        elif batch.stats.prompts_limit != before.prompts_limit:
            done = f"Its max prompts is now {batch.stats.prompts_limit}."
        self._models.alerts.add(
            "out_of_memory",
            replica.id,
            f"{replica.id} ran out of memory in a step",
            done=done,
            advice=LESS_MEMORY,
            level="error" if failed else "warning",
        )

    def check(self, now: float) -> None:
        """Replace workers that are hung, and add an alert of each that stalls; to be called every `health.CHECK_S`."""
        for replica in list(self):
            replica.check(now)
            stalled_s, stall = replica.stalled_s(now), self._stalls.get(replica.id)
            if stalled_s is not None:
                alert = stall.alert if stall is not None else self._alert_stall(replica, stalled_s)
                self._stalls[replica.id] = _Stall(alert, stalled_s)
            elif stall is not None:
                went_on = f"It went on after {stall.lasts_s:.0f} s."
                self._end_stall(replica, went_on if replica.active else "Its requests have ended.")

    def _alert_stall(self, replica: Replica, stalled_s: float) -> int:
        count, hang_s = len(replica.active), self._deployment.config.hang_s
        sentence = f"{replica.id} made no step for {stalled_s:.0f} s with {count} request{'' if count == 1 else 's'}"
        _log.warning("%s", sentence, extra={"source": replica.id})
        return self._models.alerts.add(
            "stalled",
            replica.id,
            sentence,
            done=f"It is replaced after {hang_s:g} s without a report." if hang_s else "--hang-seconds 0: it is kept.",
            advice="Read its last log lines, and see what else uses its device. To restart it, press r on its page.",
            level="warning",
        ).id

    def _end_stall(self, replica: Replica, done: str) -> None:
        if (stall := self._stalls.pop(replica.id, None)) is not None:
            self._models.alerts.add_done(stall.alert, done)

    def _alert_slow_disk(self) -> None:
        """Add an alert of a load that a slow disk holds up, once for all of its workers, and say when it goes on."""
        loading = [replica.progress for replica in self if replica.state == "loading" and replica.progress is not None]
        reading = [progress for progress in loading if progress.phase == "weights"]
        if self._slow_disk is not None and not reading:
            self._models.alerts.add_done(self._slow_disk, "Reading has ended.")
            self._slow_disk = None
        for progress in reading if self._slow_disk is None else ():
            if (rate := progress.slow_bytes_per_s) is None:
                continue
            name, left_s = self._deployment.spec.name, (progress.total - progress.done) / max(rate, 1.0)
            left = f"{left_s:.0f} s" if left_s < 120 else f"{left_s / 60:.0f} min"
            sentence = f"{name}: {self._deployment.spec.path} is read at {rate / 2**20:.3g} MiB/s, {left} left"
            _log.warning("%s", sentence)
            self._slow_disk = self._models.alerts.add(
                "slow_disk",
                name,
                sentence,
                done="The load continues.",
                advice="Move the model to a local SSD, or see what else uses the disk or the network.",
                level="warning",
            ).id
            break

    def _alert_tiers(self, replica: Replica, batch: StepBatch, before: BackendStats) -> None:
        """Add an alert where a tier of the KV cache does not work, once for all workers until it does again."""
        problem = _tier_problem(batch.stats)
        others = (each.stats for each in self if each is not replica)
        if problem and not any(map(_tier_problem, (before, *others))):
            self._models.alerts.add(
                "kv_tier",
                self._deployment.spec.name,
                problem,
                done="Prompts are computed again where their pages are missing.",
                advice="See that its disk has room and can be written, or lower --kv-disk-gib or --kv-host-gib.",
                level="warning",
            )

    def progress(self) -> LoadProgress | None:
        """The progress of the replica that is furthest behind among those that load."""
        loading = [replica.progress for replica in self if replica.progress is not None]
        loading = [progress for progress in loading if progress.phase != "wait"] or loading
        return min(loading, key=lambda progress: progress.done / max(1, progress.total), default=None)

    def share_cores(self) -> None:
        """Workers on more threads than there are cores wait for each other at every layer."""
        for replica in self:
            replica.desired.set_threads(self._desired.threads_each(len(self._models.replicas())))

    def _fail(self, errors: Iterable[ErrorInfo | None]) -> None:
        error = next((error for error in errors if error is not None), None)
        if error is not None:
            self._first.set_exception(from_info(error))
            self._first.exception()

    def _leave(self, replica: Replica) -> None:
        self._models.release_memory(replica.id)  # before its end, after which that memory is taken for free
        task = asyncio.get_running_loop().create_task(self._forget(replica, replica.stop()))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _forget(self, replica: Replica, stopped: asyncio.Task[None]) -> None:
        await stopped
        self._models.release_memory(replica.id)
        self._router.forget(replica.id)
        if self._replicas.get(replica.id) is replica:
            del self._replicas[replica.id]
            self._unnoted.pop(replica.id, None)
            self._deaths.pop(replica.id, None)
            self._end_stall(replica, "Its process was ended.")
        self._deployment.workers_changed()
