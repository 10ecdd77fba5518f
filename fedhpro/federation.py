"""The round: sample clients -> engine -> check -> aggregate -> evaluate -> record."""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import accounting, attacks, data, masking, models, nearest, robust, wire
from .config import Config, worker_count
from .data import sites
from .data.autoaugment import PolicyName
from .data.batches import Transform
from .data.clients import POOLED, ClientData, Samples, cut, merged
from .data.sources import SITES, Source, Split
from .engines.cpu import HELD_OUT, Engine, InProcess, Test, WorkerPool, one_thread
from .errors import ConfigError, FederationStalled, RunError
from .evaluation import (
    AVG,
    HELD_OUT_SAMPLES,
    accuracy,
    added_up,
    balanced_accuracy,
    class_accuracies,
    client_summary,
    domain_accuracies,
    domain_means,
    mean,
)
from .folding import Fold, WeightedMean
from .memories import ClientMemories, check_budget, generations_of, most_files
from .methods import METHODS
from .methods.base import Method, Tensors
from .privacy import Privacy, PrivateSum
from .randomness import generator, numpy_generator, seed_for
from .training import LOSS, LocalSettings, LocalTrainer, owned, section, travels

Record = dict[str, Any]


class Federation:
    """Server, clients and engine of one run. A checkpoint has to hold `model`, `state`, `nearest` and `memories`."""

    def __init__(self, config: Config, source: Source | None = None, grid: Any = None) -> None:
        """grid: what Flower gave its ServerApp to reach the nodes by; without it, engine=flower simulates them."""
        check_engine(config)
        self.config = config
        self.grid = grid
        self.source = load_source(config, source)
        self.method = config.build_method()
        self.exchange = choose_exchange(config, self.method)
        nearest.check(config, self.exchange)
        self.clients = build_clients(config, self.source, self.method)
        self.hostile = attacks.hostile_clients(config, len(self.clients))
        if config.attack == "label-flip":
            self.clients = attacks.with_flipped_labels(self.clients, self.hostile, self.source.num_classes)
        self.sizes = [len(client.train) for client in self.clients]
        self.per_round = max(1, round(config.participation * len(self.clients)))
        if config.min_clients > self.per_round:
            raise ConfigError(
                f"min_clients={config.min_clients}: there are {len(self.clients)} clients, "
                f"and {self.per_round} take part in a round"
            )
        self.privacy = Privacy.of(config)
        self._asked, self._most_asked = Counter[int](), [0]
        self.repeated = 0  # rounds that were run again with other noise, after a crash
        self.nets = build_nets(config, self.source)
        self.net = self.nets[0]  # the global model, where there is one
        self.trainer = LocalTrainer(
            self.nets,
            self.method,
            self.exchange,
            LocalSettings(
                epochs=config.local_epochs,
                steps=config.local_steps,
                batch_size=config.batch_size,
                lr=config.lr,
                lr_schedule=config.lr_schedule,
                lr_decay=config.lr_decay,
                rounds=config.rounds,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                optimizer=config.optimizer,
                balanced=config.balanced,
                nearest=config.nearest,
            ),
            build_transform(config, self.source),
            self.clients,
            self._test_sets(),
            config.seed,
            choose_device(config),
            attacks.Attack(config.attack, config.attack_scale, self.hostile, config.seed) if self.hostile else None,
            self.privacy,
        )
        self.watch = accounting.Stopwatch()  # of the last round
        self.server_flops: int | None = None  # of an aggregation
        self.confusion: dict[str, torch.Tensor] = {}  # of the last evaluation: true x predicted, per domain
        # what the server owns
        self.round = 0
        self.stalled = 0
        start = owned(self.trainer.benches[0].initial)
        self.model = {name: value for name, value in start.items() if travels(name, self.exchange)}
        self.state = owned(self.method.server_state(self.net, generator(config.seed, "server")))
        sizes = self.per_round, self.net.num_classes, self.net.dim
        self.nearest = nearest.empty(*sizes) if config.nearest else {}  # class means of the clients
        self.memories = ClientMemories()  # in a temporary folder; a run puts them into its own
        self._rehearse()
        check_budget(*self.memory_need(), config.memory_budget)
        if self.privacy is not None:
            self.privacy.check(self)
        attacks.check(config, self.exchange, len(self.clients), self.upload)
        robust.check(config, self.exchange, self.per_round, wire.num_bytes(self.upload))
        self.layout: masking.Layout | None = None
        if config.secure:
            masking.check(self)
            self.layout = masking.Layout(self.upload, by_samples=config.weights == "samples")
        self.engine: Engine | None = None

    def __enter__(self) -> Federation:
        workers = worker_count(self.config, len(self.clients))
        if self.config.engine == "flower":
            self.engine = self._flower_engine(workers)
        elif self.trainer.device.type == "cuda":
            self.engine = self._gpu_engine(workers)
        elif workers == 0:
            self.engine = InProcess(self.trainer)
        else:
            self.engine = WorkerPool(
                self.trainer, workers, [self.sent(), self.shown()], self.upload, self._memory_forms
            )
        if self.config.secure and self.config.engine != "flower":
            self.engine = masking.Rehearsed(self.engine, self)
        return self

    def _gpu_engine(self, workers: int) -> Engine:
        from .engines import cuda

        if self.config.augment == "auto" and workers > 0:
            cuda.log.warning("engine=cuda: AutoAugment draws in every step; steps run eagerly, which is slower")
        if self.config.augment == "auto" or workers == 0:
            return InProcess(self.trainer)
        return cuda.Graphs(self.trainer, self.config.workers, self.config.compile)

    def _flower_engine(self, workers: int) -> Engine:
        try:
            from .engines import flower
        except ModuleNotFoundError as error:
            raise ConfigError(f"engine=flower needs Flower, pip install 'fedhpro[flower]': {error}") from None
        return flower.Simulation(self, max(1, workers)) if self.grid is None else flower.FlowerEngine(self, self.grid)

    def __exit__(self, *_: object) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    @property
    def headline(self) -> str:
        """The way to predict that a run is judged by: where models stay at home, the nearest global prototype."""
        if self.config.nearest:
            return nearest.HEAD
        return "nearest_prototype" if self.exchange == "prototypes" else "head"

    def sent(self) -> Tensors:
        """What goes to every client: the travelling part of the model, and the method's extras."""
        extras = {} if self.exchange == "nothing" else self.method.broadcast(self.state)
        return {f"model/{name}": value for name, value in self.model.items()} | {
            f"extra/{name}": value for name, value in extras.items()
        }

    def shown(self) -> Tensors:
        """What a test needs: besides what was sent the clients' class means, which training does not."""
        return self.sent() | {f"nearest/{name}": value for name, value in self.nearest.items()}

    def travelling(self) -> Tensors:
        """An upload as it would travel: masked, compressed, or as it is."""
        if self.layout is not None:
            return {"sealed": torch.zeros(self.layout.size, dtype=torch.int64)}
        return wire.compress(self.upload, self.config.compress)

    def rounds(self, on_client: Callable[[int, int], None] | None = None) -> Iterator[Record]:
        """Run what is left of the rounds; each record is complete when it is handed out."""
        if self.round >= self.config.rounds and self.stalled >= self.config.patience:
            raise FederationStalled(f"the last {self.stalled} rounds changed nothing, and none are left")
        while self.round < self.config.rounds:
            record = self.next_round(on_client)
            yield record
            if self.stalled >= self.config.patience:
                reasons = [f"client {refusal['client']}: {refusal['reason']}" for refusal in record["refused"][-1:]]
                raise FederationStalled(
                    f"{self.stalled} rounds in a row changed nothing, the last one for this reason: "
                    f"{record['not_aggregated']}; the last refusal: {(reasons or ['none'])[0]}"
                )

    @one_thread()  # also for the server: its threads would fight with the workers over the cores
    @torch.no_grad()
    def next_round(self, on_client: Callable[[int, int], None] | None = None) -> Record:
        assert self.engine is not None, "use the federation in a with statement"
        number, watch = self.round + 1, accounting.Stopwatch()
        sent, chosen = self.sent(), self.sample(number)
        fold, losses = self._fold(number, len(chosen)), wire.Mean()
        refused, bytes_up = list[Record](), 0
        watch.lap("send")
        writers = getattr(self.engine, "writers", 0)
        with torch.enable_grad(), self.memories.written_beside(writers):
            for done, answer in enumerate(self.engine.train(number, chosen, sent, self.memories), start=1):
                watch.lap("train")
                reason = answer.error
                if self.layout is None:  # else there is no upload to check, only their sum
                    reason = reason or self.problem(answer.client, answer.upload)
                if reason is None:
                    self._accept(answer.client, answer.upload, fold, losses)
                    bytes_up += wire.num_bytes(answer.upload) if answer.bytes is None else answer.bytes
                    if answer.memory:
                        self.memories.store(answer.client, number, answer.memory)
                    elif answer.remembered:
                        self.memories.note(answer.client, number)
                else:
                    refused.append({"client": answer.client, "reason": reason})
                if on_client:
                    on_client(done, len(chosen))
                watch.lap("fold")
        watch.lap("train")
        obstacle = self._too_few(fold.count, len(chosen))
        aggregated = obstacle is None and self._aggregate(number, fold)
        self.stalled = 0 if aggregated else self.stalled + 1
        watch.lap("aggregate")
        record: Record = {"round": number, "clients": sorted(chosen), "aggregated": aggregated, "refused": refused}
        if not aggregated:
            record["not_aggregated"] = obstacle or "valid uploads came to values that are not finite"
        record |= fold.note
        if self.config.attack != "off":
            record["hostile"] = sorted(self.hostile.intersection(chosen))
        if self.privacy is not None:
            record["privacy"] = {"epsilon": round(self.privacy.epsilon(self.most_releases(number)), 4)}
        elif losses.weight:
            record["loss"] = {name: float(value) for name, value in losses.result().items()}
        record["server"] = {name: float(value) for name, value in sorted(section(self.state, "log").items())}
        record |= {"bytes_down": wire.num_bytes(sent) * len(chosen), "bytes_up": bytes_up}
        due = number % self.config.evaluate_every == 0 or number == self.config.rounds
        if due and self.config.evaluation != "off":
            record |= self.evaluate()
            watch.lap("evaluate")
        if self.engine.restarted:
            record["restarted"], self.engine.restarted = self.engine.restarted, []
        self.round, self.watch = number, watch
        return record

    def problem(self, client: int, upload: Tensors) -> str | None:
        """Why that upload cannot be used, or None."""
        if self.withheld:
            return wire.problem(upload, self.schema)
        return wire.problem(upload, self.schema, self.sizes[client], self.method.counts_all)

    @property
    def withheld(self) -> bool:
        return withholds_samples(self.config)

    def sample(self, number: int) -> list[int]:
        """The clients of a round, largest first: the order of dispatch and of folding, the same on every engine."""
        rng = numpy_generator(self.config.seed, "clients", number)
        chosen = rng.choice(len(self.clients), size=self.per_round, replace=False).tolist()
        return sorted(chosen, key=lambda k: (-self.sizes[k], k))

    def most_releases(self, number: int) -> int:
        """How often the most often asked client has been in what is released, after so many rounds."""
        while len(self._most_asked) <= number:
            self._asked.update(self.sample(len(self._most_asked)))
            self._most_asked.append(max(self._asked.values()))
        return self._most_asked[number] + self.repeated

    def evaluate(self) -> Record:
        """Accuracies of the current state, as the config asks for them."""
        assert self.engine is not None
        tests = self.tests()
        results = list(zip(tests, self.engine.evaluate(tests, self.shown(), self.memories), strict=True))
        untested = [{"client": test.owner, "test": test.name} for test, result in results if not result]
        record: Record = {"untested": untested} if untested else {}
        record |= _test_loss(results)
        heads = list(dict.fromkeys(head for _, result in results for head in result if head != LOSS))
        heads.sort(key=lambda head: head != self.headline)
        for head in heads:
            found = [(test, result[head]) for test, result in results if result]
            central = [(t.name.removeprefix("server/"), m) for t, m in found if t.name.startswith("server/")]
            own = {int(t.name.removeprefix(HELD_OUT)): m for t, m in found if t.name.startswith(HELD_OUT)}
            summary: Record = {}
            if central:
                summary["accuracy"] = domain_accuracies(central)
                summary["balanced"] = domain_accuracies(central, balanced_accuracy)
            if central and self.exchange != "model":
                summary["own_labels"] = mean(
                    [self._on_own_labels(t, m) for t, m in found if t.name.startswith("server/")]
                )
            if own:
                scores = {k: accuracy(m) for k, m in own.items()}
                summary["federated"] = client_summary(scores, {k: int(m.sum()) for k, m in own.items()})
                summary.setdefault("accuracy", {"AVG": summary["federated"]["mean"]})
            if head == heads[0]:
                record |= summary
                self.confusion = added_up(central or [(HELD_OUT_SAMPLES, m) for m in own.values()])
            record.setdefault("heads", {})[head] = summary.get("accuracy", {})
        return record

    def _on_own_labels(self, test: Test, confusion: torch.Tensor) -> float:
        """What a client's model would score on a test set with the client's own label distribution."""
        assert test.client is not None
        counts = torch.bincount(self.clients[test.client].train.y, minlength=self.source.num_classes).tolist()
        scores = [(n, score) for n, score in zip(counts, class_accuracies(confusion), strict=True) if score is not None]
        return sum(n * score for n, score in scores) / max(1, sum(n for n, _ in scores))

    def snapshot(self) -> tuple[Tensors, Record]:
        """Everything that the next round depends on."""
        tensors = {f"model/{name}": value for name, value in self.model.items()}
        tensors |= {f"state/{name}": value for name, value in self.state.items()}
        tensors |= {f"nearest/{name}": value for name, value in self.nearest.items()}
        meta = {"round": self.round, "stalled": self.stalled, "server_flops": self.server_flops}
        return tensors, meta | {"memories": dict(self.memories.generations)}

    def restore(self, tensors: Tensors, meta: Record) -> None:
        model = section(tensors, "model")
        if (reason := wire.misfit(model, wire.schema_of(self.model))) is not None:
            raise RunError(f"the checkpoint of round {meta['round']} is of another model: {reason}")
        self.model, self.state = model, section(tensors, "state")
        self.nearest = section(tensors, "nearest") or self.nearest
        self.memories.generations = generations_of(meta)
        self.round, self.stalled, self.server_flops = meta["round"], meta["stalled"], meta.get("server_flops")

    def memory_need(self) -> tuple[int, int]:
        """Bytes of a client's memory on disk, and the most files of that size that there can be at once."""
        c, sizes = self.config, [wire.num_bytes(form) for form in self._memory_forms]
        if c.data == SITES:  # on the sites' disks
            return 0, 0
        most = most_files(len(self.clients), self.per_round, c.rounds, c.checkpoint_every, c.keep_checkpoints)
        return sum(sizes) // len(sizes), most  # clients have the architectures in turn

    def _fold(self, number: int, most: int) -> Fold:
        if self.layout is not None:
            return masking.One()
        if self.privacy is not None and self.privacy.where == "central":
            return PrivateSum(self.privacy, self.model, most, self.privacy.rng("server", number))
        if self.config.robust != "off":
            return robust.RobustFold(self.config, most, self.model)
        return WeightedMean(most, by_samples=self.config.weights == "samples")

    @torch.no_grad()
    def _accept(self, client: int, upload: Tensors, fold: Fold, losses: wire.Mean) -> None:
        if self.layout is not None and not upload:  # it is in what another brought
            return fold.add(client, {}, {})
        model = section(upload, "model")
        classifier = {name: value.cpu() for name, value in model.items() if name.startswith("classifier.")}
        report = self.method.decode(section(upload, "report"), classifier)
        means = {name: value for name, value in upload.items() if name.startswith("nearest/")}
        fold.add(client, model, report | means | {"samples": upload["samples"]})
        losses.add(section(upload, "loss"), float(upload["samples"]))

    def _too_few(self, came: int, asked: int) -> str | None:
        """Why so few valid uploads are not aggregated, or None."""
        who = f"{came} of {asked} clients sent a valid upload"
        if came < self.config.min_clients:
            return f"{who}, and min_clients is {self.config.min_clients}"
        return robust.shortage(self.config, came, who)

    def _aggregate(self, number: int, fold: Fold) -> bool:
        """Whether it came to anything: from huge values that were allowed each, a method may make some that are not."""
        averaged, stacked = fold.result()
        rng = generator(self.config.seed, "aggregate", number)
        arguments = self.state, averaged, stacked, rng
        if self.server_flops is None:
            (state, override), self.server_flops = accounting.counted(self.method.aggregate, *arguments)
        else:
            state, override = self.method.aggregate(*arguments)
        model = averaged | override
        results = [*model.values(), *(value for name, value in state.items() if not name.startswith("log/"))]
        if not all(bool(value.isfinite().all()) for value in results):
            return False
        self.model, self.state = model, state
        self.nearest = nearest.latest(self.nearest, section(stacked, "nearest"))
        return True

    def _rehearse(self) -> None:
        """A client with two random samples, in this process: its upload is the schema that real ones are checked
        against, and a mistake in a method shows itself here, with its traceback.
        """
        rng = generator(self.config.seed, "rehearsal")
        noise = torch.randint(0, self.source.vocab or 256, (2, *self.source.shape), generator=rng)
        noise = noise if self.source.vocab else noise.to(torch.uint8)
        labels = torch.tensor([0, min(1, self.source.num_classes - 1)])
        one_step = dataclasses.replace(self.trainer.settings, epochs=1, steps=1)
        with one_thread():
            kinds = range(len(self.nets))
            try:
                pairs = [self.trainer.update_on(Split(noise, labels), one_step, 0, k, self.sent(), {}) for k in kinds]
            except NotImplementedError as error:  # a model that lacks what the method asks of it
                raise ConfigError(f"method={self.config.method} with model={self.config.model}: {error}") from None
        self.upload, self._memory_forms = pairs[0][0], [memory for _, memory in pairs]
        self.schema = wire.schema_of(self.upload)

    def _test_sets(self) -> dict[str, Samples]:
        sets: dict[str, Samples] = {}
        if self.config.evaluation in ("central", "both"):
            for domain in self.source.domains:
                sets[f"server/{domain.name}"] = domain.test if self.config.split == "test" else domain.validation
        if self.config.evaluation in ("federated", "both"):
            known = self.config.data != SITES  # how many samples a site has, it says itself
            sets |= {f"{HELD_OUT}{k}": c.held_out for k, c in enumerate(self.clients) if len(c.held_out) or not known}
        return sets

    def tests(self) -> list[Test]:
        """The global model on every set; or, where models stay with the clients, each on its own domain's."""
        if self.exchange == "model":
            return [Test(name) for name in self.trainer.tests]
        central = [name for name in self.trainer.tests if name.startswith("server/")]
        tests = []
        for k in sorted(self.memories):
            domain = self.clients[k].domain
            own = [name for name in central if domain in (POOLED, name.removeprefix("server/"))]
            own += [name for name in [f"{HELD_OUT}{k}"] if name in self.trainer.tests]
            tests += [Test(name, k) for name in own]
        return tests


def _test_loss(results: Sequence[tuple[Test, Tensors]]) -> Record:
    """Per domain and on average, as the accuracies are; of a diverged model it may not be a number, and is left out."""
    found = [(test.name, float(result[LOSS])) for test, result in results if result]
    central = [(name.removeprefix("server/"), loss) for name, loss in found if name.startswith("server/")]
    means = domain_means(central) if central else {AVG: mean([loss for _, loss in found])} if found else {}
    finite = {name: loss for name, loss in means.items() if math.isfinite(loss)}
    return {"test_loss": finite} if finite else {}


def withholds_samples(config: Config) -> bool:
    """Whether the server is not to learn how many samples a client has."""
    return config.secure or config.privacy == "local"


def load_source(config: Config, source: Source | None = None) -> Source:
    """The data of a run; where settings are chosen on a validation part, with that part held apart."""
    if config.data == SITES:
        return sites.outline(config)
    source = source or data.load(config.data)
    return data.with_validation(source) if config.split == "validation" else source


def build_clients(config: Config, source: Source, method: Method) -> list[ClientData]:
    """The clients of the config's scenario, or one with everybody's samples."""
    if config.data == SITES:
        if method.pools_data:
            raise ConfigError(
                f"method={config.method} has all samples in one place, and with data=sites they stay apart"
            )
        return sites.unknown(config, source)
    clients = cut(
        source,
        scenario=config.scenario,
        seed=config.seed,
        clients=config.clients,
        alpha=config.alpha,
        min_samples=config.min_samples,
        rho=config.rho,
        biased=config.nid2_clients,
        classes_each=config.nid2_classes,
        share=config.nid2_share,
        equal_size=config.nid2_equal_size,
        shards_per_client=config.shards_per_client,
        clients_per_domain=config.clients_per_domain,
        samples=config.samples_per_client,
        held_out=config.held_out if config.evaluation in ("federated", "both") else 0.0,
    )
    return [merged(clients)] if method.pools_data else clients


def choose_exchange(config: Config, method: Method) -> str:
    """What of the model travels: what was asked for, or the method's first choice that fits the models."""
    mixed = config.model in models.GROUPS
    allowed = [kind for kind in method.exchanges if not (mixed and kind == "model")]
    if not allowed or (mixed and config.exchange == "model"):
        raise ConfigError(
            f"model={config.model}: {config.method} would have to average whole models, "
            "and the clients of this federation have different ones"
        )
    if config.exchange == "auto":
        return allowed[0]
    if config.exchange not in allowed:
        others = [name for name, other in METHODS.items() if config.exchange in other.exchanges]
        raise ConfigError(
            f"exchange={config.exchange}: {config.method} exchanges {' or '.join(allowed)}; {config.exchange} is "
            f"exchanged by {', '.join(others)}"
        )
    return config.exchange


def check_engine(config: Config) -> None:
    """What only goes with Flower or a GPU, and what does not go with it."""
    if config.engine != "cuda" and config.precision == "tf32":
        raise ConfigError("precision=tf32: only a GPU has it; on a CPU choose fp32 or bf16")
    if config.engine == "flower" and config.data.startswith("python:"):
        raise ConfigError(
            f"engine=flower: {config.data} was handed over in Python, and clients in other processes cannot load it"
        )
    if config.engine != "flower" and config.data == SITES:
        raise ConfigError(f"data=sites: the data is on the machines of the sites, which engine={config.engine} has not")
    if config.engine != "flower" and config.compress is not None:
        raise ConfigError(f"compress={config.compress}: nothing travels with engine={config.engine}, only with flower")
    if config.data == SITES and config.attack != "off":
        raise ConfigError(f"attack={config.attack} is for experiments, and with data=sites the clients are real")
    if config.data == SITES and config.evaluation not in ("federated", "off"):
        raise ConfigError(f"evaluation={config.evaluation}: with data=sites only the sites have samples to test on")


def choose_device(config: Config) -> torch.device:
    if config.engine in ("cpu", "flower"):
        return torch.device("cpu")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # each stream its own way to the GPU
    if not torch.cuda.is_available():
        raise ConfigError("engine=cuda: torch sees no GPU on this machine")
    torch.backends.cudnn.allow_tf32 = config.precision != "fp32"  # of convolutions; losses always have all their bits
    return torch.device("cuda")


def build_nets(config: Config, source: Source) -> list[models.Net]:
    """The network of the run, or those of a mixed federation, whose features are all pooled to one width."""
    mixed = config.model in models.GROUPS
    if (source.vocab is not None) != (config.model == "textcnn"):
        fitting = "textcnn" if source.vocab is not None else "any other"
        raise ConfigError(f"model={config.model} does not fit {source.name}: choose {fitting}")
    try:
        nets = [
            models.build(
                name,
                source.num_classes,
                width=config.width if name.startswith("resnet") else None,
                dim=None if mixed else config.dim,
                pool_to=(config.dim or models.GROUP_DIM) if mixed else None,
                stem=config.stem,
                channels=source.shape[0],
                image_size=source.shape[-1],
                vocab=source.vocab,
                seed=seed_for(config.seed, "init"),
            )
            for name in models.GROUPS.get(config.model, (config.model,))
        ]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for net in nets:
        net.precision = torch.bfloat16 if config.precision == "bf16" else None
    return nets


def build_transform(config: Config, source: Source) -> Transform:
    policy: PolicyName = "cifar" if source.name.startswith("cifar") else "imagenet"
    return Transform(source.mean, source.std, source.crop, source.flip, config.augment, policy)
