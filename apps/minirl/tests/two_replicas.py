"""Two reference replicas and an actor in threads, synced through a whole checkpoint engine."""

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor, wait

from minirl import checkpoint_manager, worker_calls
from minirl.checkpoint_manager import CheckpointEngineManager
from minirl.checkpoint_worker import CheckpointWorker
from minirl.generation_watch import GenerationLimits
from minirl.live_verification import LiveSettings, LiveVerification
from minirl.ray_launcher import MemberDiedError
from minirl.resource_pool import Bundle, ResourcePool
from minirl.rollout_manager import RolloutManager
from minirl.sync_settings import SyncSettings
from minirl.worker_calls import WorkerCall
from minirl.workers import ActorWorker
from rl_core import plugins
from rl_core.channel import new_key
from rl_core.digests import XXH3_128
from rl_core.errors import MiniRLError
from rl_core.interfaces import CheckpointBackend, RolloutMode, TransferRole
from rl_core.testing.loopback_transport import LoopbackEngine
from rl_core.testing.reference_config import ReferenceConfig
from rl_core.testing.reference_layout import layout_spec
from rl_core.testing.reference_replica import REFERENCE_BACKEND
from rl_core.testing.reference_weights import make_weights
from rl_core.testing.thread_launcher import ThreadLauncher
from rl_core.trajectory import GenerateRequest, SamplingParams
from rl_core.versions import PolicyVersion, VersionStore

LIMIT_S = 20.0
ANSWERS_S = 2.0
FINALIZE_S = 0.5
QKV = "layers.1.qkv"
CONFIG = ReferenceConfig()
MODEL = CONFIG.model
KEY = new_key()
SMALL_BUCKETS = 0.002
LOOPBACK = CheckpointBackend("loopback", "", "rl_core.testing.loopback_transport:LoopbackEngine")
DISK = plugins.load_backend(plugins.CHECKPOINT_ENGINES, "disk")


class DeathError(BaseException):
    """A worker's process ends here."""


class Actor(ActorWorker):
    """In this process; trains by taking the weights of another seed."""

    def __init__(self):
        self._engine = self
        self.weights = make_weights(MODEL, 1)
        self.failing = False

    def manifest(self, version, run_id):
        return self.weights.manifest(version, run_id)

    def get_per_tensor_param(self):
        for number, pair in enumerate(self.pairs()):
            if self.failing and number == 2:
                raise MiniRLError("the trainer cannot gather")
            yield pair

    def pairs(self):
        return zip(self.weights.metas, self.weights.tensors.values(), strict=True)


class Receiver(CheckpointWorker):
    """In this process; `reach` is called at the points of a sync."""

    def __init__(self):
        self.reach = lambda point: None
        self.alter = lambda entries: entries
        self.report = lambda report: report

    def prepare_transfer(self):
        self.reach("prepare")
        return super().prepare_transfer()

    def connect_transfer(self, place, seconds):
        self.reach("connect")
        super().connect_transfer(place, seconds)

    def receive_weights(self, manifest, seconds):
        adapter = self._adapter
        load = type(adapter).update_weights
        adapter.update_weights = lambda leases, *rest: load(adapter, self.passing(leases), *rest)
        report = super().receive_weights(manifest, seconds)
        self.reach("loaded")
        return self.report(report)

    def passing(self, leases):
        for number, lease in enumerate(leases):
            if number == 1:
                self.reach("midway")
            lease.entries = self.alter(list(lease.entries))
            yield lease
        self.reach("end")

    def finalize_transfer(self, success):
        self.reach("finalize")
        super().finalize_transfer(success)

    def die(self):
        """Connections break, and nothing is said."""
        self._transfer.shutdown()
        raise DeathError


class Group:
    """Workers in a thread each, as a `WorkerGroup`."""

    def __init__(self, role, workers):
        self.role, self.workers = role, workers
        self.world_size = len(workers)
        self._threads = [ThreadPoolExecutor(1) for _ in workers]
        self._dead = set()

    def submit_each(self, method, arguments, ranks=None):
        ranks = range(self.world_size) if ranks is None else ranks
        return [self.submit(rank, method, arguments(rank)) for rank in ranks]

    def submit(self, rank, method, arguments):
        future = self._threads[rank].submit(self.invoke, rank, method, arguments)
        return WorkerCall(future, self.role, rank)

    def invoke(self, rank, method, arguments):
        if rank in self._dead:
            raise DeathError
        try:
            return getattr(self.workers[rank], method)(*arguments)
        except DeathError:
            self._dead.add(rank)
            raise

    def call_each(self, method, arguments, ranks=None, *, timeout_s):
        return worker_calls.wait_all(method, self.submit_each(method, arguments, ranks), timeout_s)

    def call(self, method, *args, timeout_s):
        return self.call_each(method, lambda _: args, timeout_s=timeout_s)

    def call_rank(self, rank, method, *args, timeout_s):
        return self.call_each(method, lambda _: args, [rank], timeout_s=timeout_s)[0]


def ready(futures, timeout_s):
    done, _ = wait(futures, max(0.0, min(timeout_s, 0.05)), FIRST_COMPLETED)
    return list(done), [future for future in futures if future not in done]


def fetch(future, who, log=None):
    try:
        return future.result()
    except DeathError:
        raise MemberDiedError(f"{who} died") from None


def patch(monkeypatch):
    """Calls are futures, and the backends are doubles."""
    monkeypatch.setattr(worker_calls, "ready", ready)
    monkeypatch.setattr(worker_calls, "fetch", fetch)
    monkeypatch.setattr(worker_calls, "SETTLE_S", 0.5)
    monkeypatch.setattr(checkpoint_manager, "_CONNECT_S", 1.0)
    monkeypatch.setattr(checkpoint_manager, "_FINALIZE_S", FINALIZE_S)
    monkeypatch.setattr(plugins, "load_configured", lambda *_: (REFERENCE_BACKEND, CONFIG))
    monkeypatch.setattr(plugins, "load_backend", lambda *_: LOOPBACK)


class Fleet:
    """An actor and two replicas; the parts are `actor`, `receivers`, `manager`, `sync`.

    Args:
        path: directory of the version file and of reports.
        goes_on: as `rollout.on_replica_failure`.
        late: whether replica 1 comes up only when `gate` is set.
        verify_every: every n-th sync is verified live.
        stall_s: as `rollout.stall_timeout_s`.
        on_disk: the weights go over the disk, into `exchange`; else nothing of them is kept.
    """

    def __init__(
        self, path, *, goes_on, late=False, verify_every=1, stall_s=LIMIT_S, on_disk=False
    ):
        self.manager = RolloutManager(
            "reference",
            {"tensor_model_parallel_size": 1},
            ThreadLauncher(),
            goes_on=goes_on,
            limits=GenerationLimits(LIMIT_S, stall_s),
        )
        self.exchange = path / "exchange"
        pool = ResourcePool("rollout", 2, "cpu")
        pool.bundles = [Bundle(rank, "node", "127.0.0.1", rank) for rank in range(2)]
        self.manager.create(pool, 2, RolloutMode.STANDALONE)
        self.gate = threading.Event()
        if late:
            self._hold_back()
        self.manager.start(LIMIT_S, 1 if late else None)
        self.actor, self.receivers = Actor(), [Receiver(), Receiver()]
        actors = Group("actor", [self.actor])
        for role, workers in (("sender", [self.actor]), ("receiver", self.receivers)):
            for rank, worker in enumerate(workers):
                member = TransferRole(
                    role, rank, "cpu", "127.0.0.1", KEY, "run", SMALL_BUCKETS, XXH3_128
                )
                worker._transfer = self._disk(member) if on_disk else LoopbackEngine(member)
                worker._rank = rank
        self.actor.init_live(layout_spec(MODEL), [0], 1)
        settings = SyncSettings("run", "separate", "loopback", LIMIT_S, False, True)
        versions = VersionStore(path / "version.json")
        self.sync = CheckpointEngineManager(
            actors, Group("checkpoint_worker", self.receivers), self.manager, versions, settings
        )
        live = LiveSettings(
            layout_spec(MODEL), "loopback", verify_every, True, False, str(path), 9, LIMIT_S, "run"
        )
        self.sync.live = LiveVerification(live, self.manager, actors)
        self.servers = [replica._server for replica in self.manager._replicas]
        self.answers = []
        self._over = threading.Event()
        self._clients = []

    def _disk(self, member):
        options = plugins.load_object(DISK.config_cls)(root_dir=str(self.exchange))
        return plugins.load_object(DISK.engine)(options, member)

    def _hold_back(self):
        held = self.manager._replicas[1]
        start = held.start

        def start_held(deadline):
            self.gate.wait(LIMIT_S)
            start(deadline)

        held.start = start_held

    def come_up(self):
        self.gate.set()
        self.manager._starts[1].outcome.result(LIMIT_S)
        self.servers = [replica._server for replica in self.manager._replicas]

    def publish(self, step):
        """Train, and sync what came of it."""
        self.actor.weights = make_weights(MODEL, step + 1)
        return self.sync.sync(PolicyVersion(1, step), "trained" if step else "initial")

    def watch(self):
        """Ask each server all the time; see `answers`: (replica, versions, tokens)."""
        for replica, server in enumerate(self.servers):
            thread = threading.Thread(target=self._ask_often, args=(replica, server), daemon=True)
            thread.start()
            self._clients.append(thread)

    def _ask_often(self, replica, server):
        while not self._over.wait(0.01):
            with contextlib.suppress(MiniRLError, TimeoutError, CancelledError):
                self.answers += self.ask_server(replica, server)

    def ask_server(self, replica, server):
        [item] = server.call("generate", [request("w")], timeout=ANSWERS_S)
        if item.finish_reason == "abort":
            return []
        return [(replica, {str(span.version) for span in item.version_spans}, item.token_ids)]

    def stop_watching(self):
        self._over.set()
        for thread in self._clients:
            thread.join(LIMIT_S)

    def ask(self, requests: Sequence[GenerateRequest] | None = None):
        """(replica, versions, tokens) of four requests that the manager deals out."""
        requests = requests or [request(str(number)) for number in range(4)]
        completions = self.manager.generate(requests)
        assert [item.request_id for item in completions] == [one.request_id for one in requests]
        return [
            ({str(span.version) for span in item.version_spans}, item.token_ids)
            for item in completions
        ]

    def close(self):
        self.gate.set()
        self.stop_watching()
        self.manager.shutdown(LIMIT_S)
        for worker in (self.actor, *self.receivers):
            worker.close_transfer()


def request(name):
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    return GenerateRequest(name, [3, 5, 7], sampling)
