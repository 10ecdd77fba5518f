"""Whole rounds on a tiny federation: what is promised of engines, aggregation, refusals, evaluation and resuming."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import TINY

from fedhpro import config as configuration
from fedhpro import methods, runs
from fedhpro.config import configure
from fedhpro.data.clients import ClientData
from fedhpro.data.sources import Split
from fedhpro.engines import cpu
from fedhpro.errors import ConfigError, FederationStalled
from fedhpro.federation import Federation
from fedhpro.training import section

METHODS = sorted(methods.METHODS)


def records(source, **keys):
    with Federation(configure(**(TINY | keys)), source) as federation:
        return list(federation.rounds()), federation


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("method", METHODS)
def test_same_bits_for_any_number_of_workers(tiny_source, method):
    alone, one = records(tiny_source, method=method)
    for workers in (1, 2, 3):
        pooled, other = records(tiny_source, method=method, workers=workers)
        assert json.dumps(alone) == json.dumps(pooled)
        assert same(one.snapshot()[0], other.snapshot()[0]) and one.snapshot()[1] == other.snapshot()[1]
        assert all(same(one.memories[k], other.memories[k]) for k in one.memories)


def test_half_the_bits_on_a_cpu(tiny_source):
    """bf16 gives the same bits with any number of workers too, other ones than fp32, and nearly its model."""
    (full, _), (alone, one), (pooled, other) = (
        records(tiny_source, rounds=1, lr=0.01, **keys)
        for keys in ({}, {"precision": "bf16"}, {"precision": "bf16", "workers": 2})
    )
    assert json.dumps(alone) == json.dumps(pooled) and same(one.model, other.model)
    assert alone != full and alone[0]["loss"] != full[0]["loss"]
    assert all(value.dtype == torch.float32 for value in one.model.values())
    for name, loss in full[0]["loss"].items():
        assert alone[0]["loss"][name] == pytest.approx(loss, rel=0.02)


def test_tf32_is_not_for_a_cpu(tiny_source):
    with pytest.raises(ConfigError, match="only a GPU has it; on a CPU choose fp32 or bf16"):
        Federation(configure(**TINY, precision="tf32"), tiny_source)


def test_other_seed_other_numbers(tiny_source):
    assert records(tiny_source)[0] != records(tiny_source, seed=1)[0]


def test_threads_of_the_caller_do_not_matter_and_are_left_alone(tiny_source):
    alone, _ = records(tiny_source)
    torch.set_num_threads(2)
    try:
        assert records(tiny_source)[0] == alone
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_training_learns(tiny_source):
    with Federation(
        configure(**(TINY | {"method": "fedavg", "local_epochs": 4, "lr": 0.03})), tiny_source
    ) as federation:
        untrained = federation.evaluate()["accuracy"]["AVG"]
        *_, last = federation.rounds()
        assert last["accuracy"]["AVG"] > 80 > 45 > untrained  # chance is 25


def test_uploads_are_owned_and_the_mean_is_none_of_them(tiny_source):
    """One net serves all clients in turn: were uploads alive, the mean would be the last client's model."""
    with Federation(configure(**(TINY | {"method": "fedavg"})), tiny_source) as federation:
        trainer, sent = federation.trainer, federation.sent()
        uploads = [trainer.update(1, k, sent, {})[0] for k in federation.sample(1)]
        names = [name for name in uploads[0] if name.startswith("model/")]
        assert any("running_var" in name for name in names)
        federation.next_round()
        total = sum(int(upload["samples"]) for upload in uploads)
        for name in names:
            expected = sum(upload[name].double() * int(upload["samples"]) for upload in uploads) / total
            result = federation.model[name.removeprefix("model/")]
            torch.testing.assert_close(result, expected.float(), rtol=0, atol=0)
        weight = "model/classifier.weight"
        assert not any(torch.equal(federation.model["classifier.weight"], upload[weight]) for upload in uploads)
        assert not torch.equal(uploads[0][weight], uploads[1][weight])


def test_equal_weights(tiny_source):
    with Federation(configure(**(TINY | {"method": "fedavg", "weights": "equal"})), tiny_source) as federation:
        sent = federation.sent()
        uploads = [federation.trainer.update(1, k, sent, {})[0] for k in federation.sample(1)]
        federation.next_round()
        expected = torch.stack([upload["model/classifier.bias"].double() for upload in uploads]).mean(0)
        torch.testing.assert_close(federation.model["classifier.bias"], expected.float())


def test_no_tensor_of_the_wire_is_a_batch_counter(tiny_source):
    _, federation = records(tiny_source, rounds=1)
    assert not [name for name in federation.schema if "num_batches_tracked" in name]
    assert {"model/bn1.running_var", "model/classifier.weight", "report/gradients", "samples"} & set(federation.schema)


def test_partial_participation(tiny_source):
    history, federation = records(tiny_source, participation=0.6, rounds=8)
    assert all(len(record["clients"]) == 2 for record in history)
    assert {k for record in history for k in record["clients"]} == {0, 1, 2}
    assert history[0]["bytes_down"] == 2 * sum(t.numel() * t.element_size() for t in federation.sent().values())


class Saboteur(cpu.InProcess):
    """Client 0 sends what `spoil` makes of its upload."""

    spoil = staticmethod(lambda upload: upload)
    victims: tuple[int, ...] = (0,)

    def train(self, round, clients, sent, memories):
        for answer in super().train(round, clients, sent, memories):
            if answer.client in self.victims:
                answer.upload = self.spoil(dict(answer.upload))
            yield answer


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda u: u | {"model/classifier.bias": u["model/classifier.bias"] * float("nan")}, "not finite"),
        (lambda u: u | {"model/classifier.bias": torch.zeros(7)}, "has shape [7] instead of [4]"),
        (lambda u: u | {"model/classifier.bias": torch.zeros(4).double()}, "float64 instead of float32"),
        (lambda u: {name: t for name, t in u.items() if name != "samples"}, "samples is missing"),
        (lambda u: u | {"model/backdoor": torch.zeros(1)}, "is not expected"),
        (lambda u: u | {"report/counts": -u["report/counts"]}, "negative"),
    ],
)
def test_a_bad_upload_is_refused_with_its_reason_and_the_round_goes_on(tiny_source, spoil, reason):
    with Federation(configure(**TINY), tiny_source) as federation:
        federation.engine = Saboteur(federation.trainer)
        federation.engine.spoil = spoil
        before = federation.model
        record = federation.next_round()
        assert [refusal["client"] for refusal in record["refused"]] == [0]
        assert reason in record["refused"][0]["reason"]
        assert record["aggregated"] and not same(before, federation.model)
        assert all(value.isfinite().all() for value in federation.model.values())


def test_too_few_valid_uploads_change_nothing_and_several_such_rounds_stop_the_run(tiny_source):
    with Federation(configure(**(TINY | {"min_clients": 3, "patience": 2, "rounds": 9})), tiny_source) as federation:
        federation.engine = Saboteur(federation.trainer)
        federation.engine.spoil = lambda upload: {}
        before = federation.snapshot()[0]
        seen = []
        with pytest.raises(FederationStalled, match=r"2 rounds in a row .* client 0: .* is missing") as stop:
            for record in federation.rounds():
                seen.append(record)
        assert [record["aggregated"] for record in seen] == [False, False]  # the last one is on record too
        why = "2 of 3 clients sent a valid upload, and min_clients is 3"
        assert [record["not_aggregated"] for record in seen] == [why, why] and why in str(stop.value)
        assert same(before, federation.snapshot()[0])


def test_what_a_method_makes_of_valid_uploads_must_be_finite(tiny_source, monkeypatch):
    """Values that are huge, but allowed each, may overflow on their way."""
    with Federation(configure(**(TINY | {"patience": 2, "rounds": 9})), tiny_source) as federation:
        before = federation.snapshot()[0]
        real = type(federation.method).aggregate

        def overflow(*arguments):
            state, override = real(*arguments)
            return state | {"S": state["S"] * float("inf")}, override

        monkeypatch.setattr(type(federation.method), "aggregate", overflow)
        with pytest.raises(FederationStalled, match="came to values that are not finite; the last refusal: none"):
            list(federation.rounds())
        assert same(before, federation.snapshot()[0])


def test_a_client_that_fails_is_only_missed(tiny_source, monkeypatch):
    with Federation(configure(**TINY), tiny_source) as federation:
        real = federation.trainer.update

        def update(round, k, received, memory):
            if k == 1:
                raise OSError("its disk is gone")
            return real(round, k, received, memory)

        monkeypatch.setattr(federation.trainer, "update", update)
        record = federation.next_round()
        assert record["refused"] == [{"client": 1, "reason": "OSError: its disk is gone"}] and record["aggregated"]


def test_central_and_federated_evaluation(tiny_source):
    history, federation = records(tiny_source, evaluation="both", held_out=0.25)
    last = history[-1]
    assert set(last["accuracy"]) == {"dark", "light", "AVG"}
    assert last["accuracy"]["AVG"] == pytest.approx((last["accuracy"]["dark"] + last["accuracy"]["light"]) / 2)
    assert last["federated"]["samples"] == {str(k): len(c.held_out) for k, c in enumerate(federation.clients)}
    assert set(last["federated"]["clients"]) == {"0", "1", "2"}
    only, _ = records(tiny_source, evaluation="federated", held_out=0.25)
    assert only[-1]["federated"] == last["federated"] and set(only[-1]["accuracy"]) == {"AVG"}


def test_evaluate_every_includes_the_last_round(tiny_source):
    history, _ = records(tiny_source, rounds=5, evaluate_every=3)
    assert [record["round"] for record in history if "accuracy" in record] == [3, 5]


def test_local_training_shares_nothing(tiny_source):
    """Client 0 comes to the same model whatever the others hold."""
    _, together = records(tiny_source, method="local")
    assert together.model == {} and together.sent() == {}
    with Federation(configure(**(TINY | {"method": "local"})), tiny_source) as federation:
        other = federation.clients[1]
        flipped = Split(other.train.x, 3 - other.train.y)
        federation.clients[1] = ClientData(other.domain, flipped, other.held_out)
        list(federation.rounds())
        assert same(federation.memories[0], together.memories[0])
        assert not same(federation.memories[1], together.memories[1])


def test_centralised_is_one_client_with_everything(tiny_source):
    _, federation = records(tiny_source, method="centralised")
    assert len(federation.clients) == 1 and federation.sizes == [2 * 12 + 20]


def test_classifier_exchange_keeps_the_extractors_at_home(tiny_source):
    _, federation = records(tiny_source, method="fedavg", exchange="classifier")
    assert set(federation.model) == {"classifier.weight", "classifier.bias"}
    mine, yours = (section(federation.memories[k], "net") for k in (0, 1))
    assert "classifier.weight" not in mine and not same(mine, yours)


@pytest.mark.parametrize("method", METHODS)
def test_resume_gives_the_same_bytes(tiny_source, tmp_path, method):
    keys = TINY | {"method": method, "rounds": 4, "participation": 0.7}
    whole = runs.run(configure(**keys, out=str(tmp_path / "whole")), source=tiny_source)
    cut = runs.run(configure(**(keys | {"rounds": 2}), out=str(tmp_path / "cut")), source=tiny_source)
    resumed = runs.resume(cut.folder, source=tiny_source, rounds=4)
    assert (whole.folder / "metrics.jsonl").read_bytes() == (resumed.folder / "metrics.jsonl").read_bytes()
    assert configuration.load(resumed.folder / "config.toml").rounds == 4
    for name in ("model.safetensors",) if method != "local" else ():
        assert (whole.folder / name).read_bytes() == (resumed.folder / name).read_bytes()
    final = sorted((whole.folder / "checkpoints").glob("*.safetensors"))[-1].name
    a, b = (runs.load_tensors(folder / "checkpoints" / final)[0] for folder in (whole.folder, resumed.folder))
    assert same(a, b)
    kept = [
        {path.name: path.read_bytes() for path in (folder / "memories").glob("*")}
        for folder in (whole.folder, resumed.folder)
    ]
    assert kept[0] == kept[1] and bool(kept[0]) == (method in ("moon", "local", "fedsa", "fedsa-hp"))


def test_resume_repeats_a_round_whose_checkpoint_is_damaged_or_was_never_written(tiny_source, tmp_path):
    keys = TINY | {"rounds": 3}
    whole = runs.run(configure(**keys, out=str(tmp_path / "whole")), source=tiny_source)
    expected = (whole.folder / "metrics.jsonl").read_bytes()
    newest = sorted((whole.folder / "checkpoints").glob("*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-9])
    with (whole.folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "cli')  # cut off while it was written
    resumed = runs.resume(whole.folder, source=tiny_source)
    assert (whole.folder / "metrics.jsonl").read_bytes() == expected and len(resumed.history) == 3


def test_resume_refuses_another_config_and_another_folder(tiny_source, tmp_path):
    done = runs.run(configure(**TINY, out=str(tmp_path / "run")), source=tiny_source)
    with pytest.raises(ConfigError, match="lr cannot change"):
        runs.resume(done.folder, source=tiny_source, lr=0.5)
    with pytest.raises(ConfigError, match="there is no run folder"):
        runs.resume(tmp_path / "nothing", source=tiny_source)
    with pytest.raises(ConfigError, match="not a run folder"):
        runs.resume(tmp_path, source=tiny_source)


def test_interrupt_leaves_a_usable_folder(tiny_source, tmp_path):
    from fedhpro.callbacks import Callback

    class Stop(Callback):
        def client(self, round, done, total):
            if (round, done) == (2, 1):
                raise KeyboardInterrupt

    keys = TINY | {"rounds": 3, "workers": 2}
    result = runs.run(configure(**keys, out=str(tmp_path / "run")), source=tiny_source, callbacks=[Stop()])
    assert result.status == "interrupted" and len(result.history) == 1
    assert json.loads((result.folder / "result.json").read_text())["status"] == "interrupted"
    assert (result.folder / "model.safetensors").exists() and (result.folder / "curves.png").exists()
    whole = runs.run(configure(**keys, out=str(tmp_path / "whole")), source=tiny_source)
    assert runs.resume(result.folder, source=tiny_source).history == whole.history


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_a_round_is_put_on_record_waits_until_it_is(tiny_source, tmp_path, monkeypatch, number):
    real = runs.RunFolder._append

    def append(path, record, safely=False):
        if record["round"] == 2:
            signal.raise_signal(number)
        real(path, record, safely)

    monkeypatch.setattr(runs.RunFolder, "_append", staticmethod(append))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the command line does
    try:
        result = runs.run(configure(**(TINY | {"rounds": 3}), out=str(tmp_path / "run")), source=tiny_source)
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.status == "interrupted" and len(result.history) == 2
    assert len((result.folder / "timings.jsonl").read_text().splitlines()) == 2
    assert (result.folder / "checkpoints" / "round-000002.json").exists()


@pytest.mark.slow
def test_killed_and_resumed_main_job(tmp_path):
    """kill -9 of the real command in the middle of a round; the resumed metrics are those of the uninterrupted run."""
    command = [sys.executable, "-m", "fedhpro", "run", "rounds=4", "local_epochs=1", "--quiet"]
    subprocess.run([*command, f"out={tmp_path / 'whole'}"], check=True)
    victim = subprocess.Popen([*command, f"out={tmp_path / 'cut'}"])
    metrics = tmp_path / "cut" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert victim.poll() is None
        time.sleep(0.02)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    subprocess.run([sys.executable, "-m", "fedhpro", "resume", str(tmp_path / "cut"), "--quiet"], check=True)
    assert metrics.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_a_folder_with_another_run_is_not_touched(tiny_source, tmp_path):
    config = configure(**TINY, out=str(tmp_path / "run"))
    runs.run(config, source=tiny_source)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="already holds a run"):
        runs.run(config, source=tiny_source)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="not empty"):
        runs.run(config.replace(out=str(tmp_path / "full")), source=tiny_source)


def test_checkpoints_kept(tiny_source, tmp_path):
    runs.run(configure(**(TINY | {"rounds": 5, "keep_checkpoints": 2}), out=str(tmp_path / "run")), source=tiny_source)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == [f"round-00000{r}.{kind}" for r in (4, 5) for kind in ("json", "safetensors")]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", ["missing", "shape", "type"])
def test_a_report_that_does_not_fit_is_refused_on_every_engine(tiny_source, workers, fault):
    """Shared memory must not bend a wrong shape or type into the right one, nor keep another client's tensor."""
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Faulty(methods.Method):
        name = "faulty"

        def report(self, client, context):
            right = {"a": torch.zeros(3), "b": torch.ones(2)}
            if len(client.data) != 20:  # the rehearsal and the small clients are right
                return right
            return {
                "missing": {"a": right["a"]},
                "shape": right | {"a": torch.zeros(1)},
                "type": right | {"a": torch.zeros(3).double()},
            }[fault]

    try:
        with Federation(configure(**(TINY | {"method": "faulty", "workers": workers})), tiny_source) as federation:
            record = federation.next_round()
    finally:
        del methods.METHODS["faulty"]
    large = [k for k, client in enumerate(federation.clients) if len(client.train) == 20]
    assert [refusal["client"] for refusal in record["refused"]] == large and record["aggregated"]


def test_more_clients_asked_for_than_take_part(tiny_source):
    with pytest.raises(ConfigError, match="and 1 take part in a round"):
        Federation(configure(**(TINY | {"participation": 0.3, "min_clients": 2})), tiny_source)


def test_interrupt_in_the_evaluation_leaves_the_model_of_the_reported_round(tiny_source, tmp_path, monkeypatch):
    real = Federation.evaluate

    def evaluate(self):
        if self.round == 1:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Federation, "evaluate", evaluate)
    result = runs.run(configure(**(TINY | {"rounds": 3}), out=str(tmp_path / "run")), source=tiny_source)
    assert result.status == "interrupted" and len(result.history) == 1
    saved = runs.load_tensors(tmp_path / "run" / "checkpoints" / "round-000001.safetensors")[0]
    from safetensors.torch import load_file

    model = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(model["classifier.weight"], saved["model/classifier.weight"])


def test_resume_when_metrics_were_lost_and_when_rounds_are_fewer(tiny_source, tmp_path):
    keys = TINY | {"rounds": 4}
    whole = runs.run(configure(**keys, out=str(tmp_path / "run")), source=tiny_source)
    expected = (whole.folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"4 rounds of .* are done already"):
        runs.resume(whole.folder, source=tiny_source, rounds=2)
    lines = expected.splitlines(keepends=True)
    (whole.folder / "metrics.jsonl").write_bytes(b"".join(lines[:3]))
    assert len(runs.resume(whole.folder, source=tiny_source).history) == 4
    assert (whole.folder / "metrics.jsonl").read_bytes() == expected
    cosine = runs.run(configure(**(keys | {"lr_schedule": "cosine"}), out=str(tmp_path / "c")), source=tiny_source)
    with pytest.raises(ConfigError, match="cosine"):
        runs.resume(cosine.folder, source=tiny_source, rounds=8)
