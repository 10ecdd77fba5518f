"""What reviewers ran into: commands that crashed, or said less than the truth."""

import dataclasses
import io
import json
from datetime import datetime
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, call, tiny
from PIL import Image
from rich.console import Console

import fedhpro
from fedhpro import runs
from fedhpro.attacks import Attack
from fedhpro.comparison import Comparison, _folder_names, compare, entries, table
from fedhpro.config import configure, without_effect
from fedhpro.data.own import from_csv, from_folder, from_tensors
from fedhpro.errors import ConfigError, DataError, RunError
from fedhpro.evaluation import headline, rounds_to_accuracy
from fedhpro.federation import Federation
from fedhpro.heads import NAMES, heads
from fedhpro.methods import Method
from fedhpro.nearest import latest, logits
from fedhpro.probe import local_accuracies
from fedhpro.progress import Terminal, trouble
from fedhpro.training import step
from fedhpro.use import predict, read_images

SMALL = ["local_steps=1", "clients_per_domain=1", "workers=0"]


def test_rounds_that_tested_fewer_domains_are_no_best_round():
    few, all_of_them = {"a": 90.0, "AVG": 90.0}, {"a": 60.0, "b": 40.0, "AVG": 50.0}
    history = [{"round": 1, "accuracy": few}, {"round": 2}, {"round": 3, "accuracy": all_of_them}]
    assert headline(history) == {"final": 50.0, "best": 50.0, "best_round": 3, "last5": 50.0}
    assert headline(history, "b")["best"] == 40.0 and headline(history, "c") == {}
    assert rounds_to_accuracy(history, 45) == 3 and rounds_to_accuracy(history, 80) is None


def test_models_that_stay_at_clients_who_did_not_all_take_part(capsys, tmp_path):
    code, _, error = call(
        capsys, "run", "method=local", "participation=0.25", "rounds=3", *SMALL, f"out={tmp_path / 'run'}"
    )
    assert code == 0, error
    arguments = ["compare", "local", "fedavg", "-q", "participation=0.25", "rounds=1", *SMALL, "--seeds", "0,1"]
    code, _, error = call(capsys, *arguments, "--out", tmp_path / "both")
    assert code == 0, error
    local, fedavg = json.loads((tmp_path / "both" / "comparison.json").read_text())
    assert set(fedavg["domains"]) > set(local["domains"])
    title = (tmp_path / "both" / "comparison.md").read_text().splitlines()[0]
    assert title.endswith("| AVG final | AVG best | AVG last five |")


def test_the_control_is_there_once_and_a_row_is_not_another_by_its_spelling():
    labels = [entry.label for entry in entries(["fedhpro", "fedhpro:M=0"], {})]
    assert labels == ["fedhpro", "fedhpro M=0"]
    assert len(entries(["fedhpro:I=1", "fedhpro:M=0,I=1"], {})) == 2
    with pytest.raises(ConfigError, match=r"twice with the same settings: fedavg and fedavg lr=0\.03"):
        entries(["fedavg", "fedavg:lr=0.03"], {})
    with pytest.raises(ConfigError, match="fedavg:seed=5: seed is not a setting of a row"):
        entries(["fedavg:seed=5"], {})


def test_comparisons_that_start_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "datetime", SimpleNamespace(now=lambda: datetime(2026, 1, 1)))
    begun = []

    def start(config, title):
        begun.append(config.out)
        raise RunError("not now")

    for _ in range(2):
        with pytest.raises(RunError, match="none of the runs could start"):
            compare(entries(["fedavg"], {}), [0], {}, start)
    assert begun == [f"runs/20260101-000000-compare{again}/fedavg-seed0" for again in ("", "-2")]


def test_a_comparison_shows_finished_runs_only(tiny_source, tmp_path):
    done = runs.run(configure(**TINY, out=str(tmp_path / "run")), source=tiny_source)
    config = configure(**TINY | {"rounds": done.config.rounds + 1}, out=str(tmp_path / "run"))
    (tmp_path / "run" / "config.toml").write_text(config.to_toml())  # gone on with for more rounds, and killed
    longer = runs.load_result(tmp_path / "run")
    assert done.status == "finished" and longer.status == "running"
    found = Comparison(tmp_path, [0], {"a": [done], "b": [longer]})
    assert [row["method"] for row in found.rows()] == ["a"] and found.finished == 1


def test_a_comparison_shows_the_mean_of_the_classes_where_it_is_another_number(tiny_source, tmp_path):
    keys = TINY | {"method": "fedavg", "local_steps": 1, "rounds": 1}
    done = runs.run(configure(**keys, out=str(tmp_path / "run")), source=tiny_source)
    found = Comparison(tmp_path, [0], {"fedavg": [done]})
    assert "balanced" not in found.rows()[0]  # as many test samples of each class
    done.history[-1]["balanced"] = {"AVG": 25.0}
    assert found.rows()[0]["balanced"] == (25.0, None)
    assert found.markdown().splitlines()[0].endswith("| AVG last five | mean of classes, final |")
    del done.history[-1]["balanced"]
    assert "balanced" not in found.rows()[0]


def test_a_sweep_over_uneven_classes_has_their_mean(capsys, tmp_path):
    for label, number in {"ill": 12, "well": 30}.items():
        (tmp_path / "data" / label).mkdir(parents=True)
        for i in range(number):
            Image.new("RGB", (16, 16), (i, 200 * (label == "ill"), 0)).save(tmp_path / f"data/{label}/{i}.png")
    data = f"data=folder:{tmp_path / 'data'}"
    rows = ["sweep", "lr=0.01,0.1", "method=fedavg", data, "scenario=iid", "clients=2", "rounds=1"]
    code, _, error = call(capsys, *rows, "local_steps=1", "--out", tmp_path / "out", "--parallel", "1")
    assert code == 0, error
    cells = json.loads((tmp_path / "out/sweep.json").read_text())["cells"]
    assert [cell["column"] for cell in cells] == ["AVG", "balanced"] * 2


def test_a_sweep_takes_data_with_options_and_several_data(capsys, tmp_path):
    for site in ("north", "south", "east"):
        for label in ("ill", "well"):
            folder = tmp_path / ("b" if site == "east" else "a") / site / label
            folder.mkdir(parents=True)
            for i in range(12):
                Image.new("RGB", (16, 16), (i, 200 * (label == "ill"), ord(site[0]))).save(folder / f"{i}.png")
    a, b = tmp_path / "a", tmp_path / "b" / "east"
    keys = ["scenario=iid", "clients=2", "rounds=1", "local_steps=1", "method=fedavg", "--out", tmp_path / "out"]
    code, text, error = call(capsys, "sweep", "lr=0.01,0.03", f"data=folder:{a},size=16,crop=0", *keys, "--dry-run")
    assert code == 0 and "2 runs" in text, error
    code, _, error = call(capsys, "sweep", f"data=folder:{b},folder:{a},size=8", *keys, "--parallel", "1")
    assert code == 0, error
    found = json.loads((tmp_path / "out/sweep.json").read_text())
    assert found["title"] == "Sweep of data" and found["problems"] == []
    assert {(cell["row"], cell["setting"]) for cell in found["cells"]} == {
        (f"fedavg data=folder:{b}", "data"), (f"fedavg data=folder:{a},size=8", "data")
    }  # fmt: skip
    means = {(cell["row"].endswith("size=8"), cell["column"]): cell["mean"] for cell in found["cells"]}
    assert None not in [means[True, name] for name in ("north", "south", "AVG")]
    assert means[False, "AVG"] is not None and means[False, "north"] is None


def test_fairness_of_own_models_needs_test_sets_at_the_server(tiny_source, tmp_path):
    config = configure(**TINY | {"method": "fedavg", "evaluation": "federated"}, out=str(tmp_path))
    runs.run(config, source=tiny_source)
    with pytest.raises(RunError, match="no test sets at the server: evaluation=federated"):
        local_accuracies(tmp_path, tiny_source)


def test_a_stalled_run_does_not_end_a_comparison(capsys, tmp_path):
    rows = ["fedavg:lr=1e30", "fedprox", "rounds=4", *SMALL]
    code, _, error = call(capsys, "compare", *rows, "-q", "--out", tmp_path / "both")
    assert code == 1 and "1 of 2 are finished" in error
    assert [row["method"] for row in json.loads((tmp_path / "both/comparison.json").read_text())] == ["fedprox"]


def test_a_run_that_stalled_at_its_end_is_no_result_when_the_command_is_given_again(capsys, tmp_path):
    command = ["sweep", "lr=1e30,0.01", "rounds=2", "patience=2", "method=fedavg", *SMALL[:2], "--out", tmp_path]
    for _ in range(2):
        code, text, error = call(capsys, *command, "--parallel", "1")
        assert code == 1 and "1 runs failed" in error and "lr=1e30" in text and "changed nothing" in text
        found = json.loads((tmp_path / "sweep.json").read_text())
        assert {cell["row"] for cell in found["cells"] if cell["mean"] is not None} == {"fedavg lr=0.01"}
        assert "is not finished" in found["problems"][0]


def test_resume_of_a_finished_run_says_so_and_keeps_its_costs(capsys, tmp_path):
    code, _, error = call(capsys, "run", "method=fedhpro", "rounds=1", *SMALL, f"out={tmp_path}", "-q")
    first = json.loads((tmp_path / "result.json").read_text())
    assert code == 0, error
    code, _, error = call(capsys, "resume", tmp_path, "-q")
    again = json.loads((tmp_path / "result.json").read_text())
    assert code == 0 and "had been done before" in error and f"resume {tmp_path} rounds=2" in error
    assert again["costs"]["flops"] == first["costs"]["flops"] and first["costs"]["flops"]["server"] > 0
    code, _, error = call(capsys, "resume", tmp_path, "rounds=2", "-q")
    longer = json.loads((tmp_path / "result.json").read_text())
    assert code == 0 and "done before" not in error
    assert longer["costs"]["flops"]["server"] == 2 * first["costs"]["flops"]["server"]


def test_keys_that_do_nothing_are_named():
    config = configure(alpha=0.1, clients=5, attack_share=0.3, local_epochs=2, local_steps=1)
    assert without_effect(config, ["alpha", "clients", "attack_share", "local_epochs", "lr"]) == [
        "alpha has no effect with scenario=domains", "clients has no effect with scenario=domains",
        "attack_share has no effect with attack=off", "local_epochs has no effect with local_steps=1",
    ]  # fmt: skip
    assert without_effect(configure(scenario="nid1", alpha=0.1, clients=5), ["alpha", "clients", "scenario"]) == []
    idle = ["held_out", "lr_decay", "samples_per_client", "robust_clip", "nid2_share", "min_samples", "compile"]
    assert len(without_effect(configure(scenario="iid"), idle)) == len(idle)
    used = configure(scenario="nid1", evaluation="both", lr_schedule="exponential", robust="clip", engine="cuda")
    assert without_effect(used, idle) == [f"{name} has no effect with scenario=nid1" for name in (idle[2], idle[4])]
    assert without_effect(configure(robust="median"), ["robust_share"]) == [
        "robust_share has no effect with robust=median"
    ]
    keys = ["momentum", "width", "stem", "image_size", "classes", "join_deadline"]
    told = without_effect(configure(data="docs-lite"), keys)
    reasons = ["optimizer=adam", *["model=textcnn"] * 2, *["data=docs-lite"] * 2, "engine=cpu"]
    assert told == [f"{key} has no effect with {why}" for key, why in zip(keys, reasons, strict=True)]
    sites = configure(data="sites", classes="a,b", model="htfe2")
    assert without_effect(sites, keys) == without_effect(configure(model="resnet18"), keys[:3]) == []


def test_compare_names_keys_that_do_nothing(capsys, tmp_path):
    rows = ["fedavg", "fedprox", "alpha=0.1", "rounds=1", *SMALL, "--out", tmp_path]
    code, _, error = call(capsys, "compare", *rows, "-q")
    assert code == 0 and error.count("alpha has no effect with scenario=domains") == 1


def test_a_folder_or_file_as_data_is_told_how_to_be_written(tmp_path):
    with pytest.raises(ConfigError, match=f"data=folder:{tmp_path}$"):
        configure(data=str(tmp_path))
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(ConfigError, match=r"data=csv:.*a\.csv$"):
        configure(data=str(tmp_path / "a.csv"))


def test_a_run_folder_is_no_picture(tiny_source, tmp_path):
    done = runs.run(configure(**TINY, out=str(tmp_path / "run")), source=tiny_source)
    with pytest.raises(RunError, match="run is a run folder, and no images"):
        predict(done.folder, [done.folder])


def test_flops_of_a_balanced_run_are_counted(tiny_source, tmp_path):
    done = runs.run(configure(**TINY | {"method": "fedavg"}, balanced=True, out=str(tmp_path)), source=tiny_source)
    assert "error" not in done.costs["flops"] and done.costs["flops"]["training"] > 0


def test_a_poisoned_vote_is_the_other_one():
    attack = Attack("poison", 10.0, frozenset([0]), 0)
    spoilt = attack.on({"report/vote": torch.tensor(1.0), "report/means": torch.arange(3.0)}, {}, 1, 0)
    assert spoilt["report/vote"] == 0 and spoilt["report/means"].tolist() == [20.0, 0.0, 10.0]


def test_heads_are_tested_on_the_servers_sets_where_there_are_any(tiny_source, tmp_path):
    keys = TINY | {"method": "fedavg", "evaluation": "both", "held_out": 0.2}
    done = runs.run(configure(**keys, out=str(tmp_path)), source=tiny_source)
    assert heads(done.folder, tiny_source)[next(iter(NAMES))] == pytest.approx(done.accuracy["AVG"], abs=1e-3)


def test_a_class_that_nobody_holds_keeps_its_means():
    kept = {"means": torch.ones(2, 3, 4), "counts": torch.tensor([[5, 5, 5], [0, 5, 0]])}
    new = {"means": torch.full((1, 3, 4), 2.0), "counts": torch.tensor([[1, 0, 1]])}
    found = latest(kept, new)
    assert found["counts"].tolist() == [[1, 5, 1], [0, 5, 0]]
    assert found["means"][0, :, 0].tolist() == [2, 1, 2] and found["means"][1, 1, 0] == 1
    assert latest({}, {}) == {}


def test_rounds_that_change_nothing_are_said_to(tiny_source, tmp_path):
    keys = TINY | {"method": "fedtgp", "server_lr": 1e30}
    done = runs.run(configure(**keys, out=str(tmp_path)), source=tiny_source)
    assert not any(record["aggregated"] for record in done.history)
    assert trouble(done).endswith("rounds changed nothing")
    assert "values that are not finite" in (tmp_path / "report.html").read_text()


def test_files_that_are_no_pictures_are_counted_and_an_archives_shadow_is_no_site(tmp_path, caplog):
    for site in ("north", "south", "__MACOSX"):
        for label in ("ill", "well"):
            (tmp_path / site / label).mkdir(parents=True)
            for number in range(6):
                colour = (number, 100 * (label == "ill"), 100 * (site == "north"))
                Image.new("RGB", (16, 16), colour).save(tmp_path / site / label / f"{number}.png")
    (tmp_path / "north/ill/scan.dcm").write_bytes(b"")
    assert [domain.name for domain in from_folder(tmp_path).domains] == ["north", "south"]
    assert caplog.messages == [f"{tmp_path}: left out what is no picture that can be read here: 1 .dcm"]


def test_pictures_to_train_on_and_to_test_on_that_are_the_same_are_counted(caplog):
    x = torch.arange(40, dtype=torch.uint8)[:, None, None, None].expand(40, 3, 8, 8).contiguous()
    y, sites = torch.arange(40) % 2, ["north"] * 20 + ["south"] * 20
    from_tensors(x, y, sites=sites)
    assert not caplog.messages
    x[20:] = x[:20]  # every picture of the one site is at the other one as well
    found = from_tensors(x, y, sites=sites)
    trained = {int(value) for domain in found.domains for value in domain.train.x[:, 0, 0, 0]}
    tested = [int(value) for domain in found.domains for value in domain.test.x[:, 0, 0, 0]]
    twice = sum(value in trained for value in tested)
    assert twice > 0 and f"{twice} of {len(tested)} test samples are training samples too" in caplog.text


def test_without_any_means_all_classes_are_as_likely():
    found = logits(torch.rand(2, 4), torch.zeros(3, 5, 4), torch.zeros(3, 5, dtype=torch.int64)).softmax(1)
    assert torch.allclose(found, torch.full((2, 5), 0.2))


def test_predict_reads_the_csv_file_that_a_run_reads(tmp_path):
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    (tmp_path / "list.csv").write_text("image;label;site\na.png;ill;north\n")
    assert [name for name, _ in read_images(tmp_path / "list.csv", (3, 8, 8))] == ["a.png"]


def test_a_comparison_has_no_runs_of_another_config(capsys, tmp_path):
    command = ["compare", "fedavg", "fedprox", "-q", "rounds=1", "samples_per_client=40", *SMALL, "--out", tmp_path]
    assert call(capsys, *command)[0] == 0
    before = (tmp_path / "comparison.md").read_text()
    for more in ([], ["--parallel", "2"]):
        code, text, error = call(capsys, *command, "lr=0.5", *more)
        assert code == 2 and "fedavg" not in text and error.count("another config") == 2
    assert (tmp_path / "comparison.md").read_text() == before
    (tmp_path / "fedprox-seed0").rename(tmp_path / "elsewhere")
    code, text, error = call(capsys, *command, "lr=0.5", "--parallel", "2")
    assert code == 1 and "fedprox" in text and "fedavg" not in text and "1 of 2 are finished" in error


def test_rows_whose_labels_differ_in_signs_only_have_folders_of_their_own():
    rows = entries(["fedavg", "fedavg:data=folder:/a/b", "fedavg:data=folder:/a-b"], {})
    plain, *alike = _folder_names(rows, {})
    assert plain == "fedavg" and len(set(alike)) == 2
    assert all(name.startswith("fedavg-data-folder--a-b-") for name in alike)


def test_a_row_that_its_data_does_not_allow_does_not_end_a_comparison(capsys, tmp_path):
    rows = ["fedavg", "fedavg:model=textcnn", "fedprox", "rounds=1", "samples_per_client=40", *SMALL]
    code, _, error = call(capsys, "compare", *rows, "-q", "--out", tmp_path)
    assert code == 1 and "model=textcnn does not fit" in error and "2 of 3 are finished" in error
    assert [row["method"] for row in json.loads((tmp_path / "comparison.json").read_text())] == ["fedavg", "fedprox"]


def test_sites_of_any_name_and_missing_seeds_show_in_a_comparison(tmp_path):
    def finished(seed):
        scores = {"best": 10.0, "seeds": 20.0, "[x]": 30.0, "AVG": 20.0}
        return runs.Result(tmp_path, configure(seed=seed), [{"round": 1, "accuracy": scores}], "finished")

    found = Comparison(tmp_path, [0, 1], {"a": [finished(0), finished(1)], "b": [finished(0)]})
    header, _, a, b = found.markdown().splitlines()
    assert header == "| method | best | seeds | [x] | AVG final | AVG best | AVG last five |"
    assert a.startswith("| a | 10.00 ± 0.00 | 20.00 ± 0.00 | 30.00 ± 0.00 | 20.00 ± 0.00 |")
    assert b == "| b (1 of 2 seeds) | 10.00 | 20.00 | 30.00 | 20.00 | 20.00 | 20.00 |"
    assert [row["seeds"] for row in found.rows()] == [[0, 1], [0]]
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(table(found))
    assert "[x]" in console.export_text()


def test_resume_of_a_finished_cosine_run_advises_nothing_that_is_refused(capsys, tmp_path):
    call(capsys, "run", "method=fedavg", "lr_schedule=cosine", "rounds=1", *SMALL, f"out={tmp_path}", "-q")
    code, _, error = call(capsys, "resume", tmp_path, "-q")
    assert code == 0 and "had been done before" in error and "rounds=2" not in error


def test_heads_call_what_clients_hold_out_no_domains(capsys, tmp_path):
    run = ["run", "method=fedavg", "evaluation=federated", "rounds=1", *SMALL, f"out={tmp_path}", "-q"]
    assert call(capsys, *run)[0] == 0
    code, text, error = call(capsys, "heads", tmp_path)
    assert code == 0 and "mean of the test sets" in text and "domains" not in text, error


def test_progress_says_steps_and_takes_no_site_for_markup():
    stream = io.StringIO()
    domains = [dataclasses.replace(domain, name=f"{domain.name}[b]") for domain in tiny().domains]
    allocation = {"dark[b]": (1, 12), "light[b]": (1, 12)}
    source = dataclasses.replace(tiny(), domains=tuple(domains), allocation=allocation)
    with Federation(configure(**TINY, local_steps=1), source) as federation:
        terminal = Terminal(Console(file=stream, width=200))
        terminal.start(federation, SimpleNamespace(history=[]))
        terminal.round(federation.next_round())
    assert "2 rounds of 1 step, seed 0" in stream.getvalue()
    assert "dark[b] " in stream.getvalue().splitlines()[1]


@pytest.mark.parametrize("source", ["folder:data", (1, 2)], ids=str)
def test_a_source_that_is_none_is_one_sentence(source):
    with pytest.raises(ConfigError, match=r"source takes what from_folder, .* gives, not .*data='folder:PATH'"):
        runs.run(source=source)


def test_an_option_of_own_data_that_there_is_not_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match="no option 'sizes': choose from size, test_share"):
        from_folder(tmp_path, sizes=64)
    with pytest.raises(DataError, match=r"no option 'label': choose from .*label_column"):
        from_csv(tmp_path / "list.csv", label="finding")
    with pytest.raises(DataError, match=r"no option 'site': choose from .*sites"):
        from_tensors([], [], site=[])


def test_a_list_of_whole_numbers_is_not_taken_for_floats():
    with pytest.raises(DataError, match="not int64: convert it to uint8"):
        from_tensors([[[[0] * 8] * 8]] * 6, [0, 1] * 3)


def test_a_csv_file_of_another_separator_shows_what_was_read(tmp_path):
    (tmp_path / "list.csv").write_text("image\tlabel\n1.png\till\n")
    with pytest.raises(DataError, match=r"it has 'image\\tlabel'$"):
        from_csv(tmp_path / "list.csv")


def test_a_loss_without_a_name_says_what_is_wanted():
    class Bare(Method):
        name = "bare"

        def loss(self, net, frozen, x, y, context):
            return net(x).sum()

    with pytest.raises(TypeError, match="bare: loss returns named terms"):
        step(lambda x: x, {}, Bare(), None, torch.ones(2), torch.zeros(2), {}, {})


def test_what_is_imported_late_is_offered_for_completion():
    assert {"run", "resume", "Result"} <= set(dir(fedhpro))


def test_a_round_in_which_nobody_can_learn_says_so(capsys, tmp_path):
    keys = ["scenario=shards", "shards_per_client=1", "clients=10", "rounds=1", "local_steps=1", "workers=0"]
    code, text, _ = call(capsys, "run", *keys, "--out", tmp_path / "run")
    assert code == 0 and "round 1: nothing was learned, every loss is 0" in text
    code, text, _ = call(capsys, "run", "method=fedavg", *keys, "--out", tmp_path / "other")
    assert code == 0 and "nothing was learned" not in text
