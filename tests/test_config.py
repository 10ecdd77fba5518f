"""The config: defaults, presets, one sentence for every mistake, and config.toml as the same config again."""

import dataclasses
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhpro import config as module
from fedhpro.config import PRESETS, Config, chosen_unnamed, configure, load, method_keys, parse
from fedhpro.errors import ConfigError
from fedhpro.methods import METHODS
from fedhpro.methods.base import Method, Positive

TRAINING = {"rounds": 100, "local_epochs": 10, "batch_size": 64, "clients": 10, "participation": 1.0}
# written out once more: a preset must not change unnoticed
PAPER = TRAINING | {
    "method": "fedhpro",
    "I": 5,
    "M": 30,
    "tau": 0.05,
    "match_lr": 0.1,
    "margin": "inside",
    "gradients": "after",
    "gradient_samples": 0,
    "gradient_scale": "mean",
    "matching": "cosine",
    "hpcl_scale": "mean",
    "hpal_form": "sum",
    "retrain_classifier": False,
    "lr": 0.01,
    "momentum": 0.9,
    "weight_decay": 1e-5,
    "augment": "sample",
    "model": "resnet10",
    "width": 64,
    "stem": "3x3",
    "scenario": "domains",
}
RELEASED = PAPER | {
    "margin": "off",
    "gradients": "before",
    "gradient_samples": 100,
    "gradient_scale": "mean/n",
    "matching": "sign",
    "hpcl_scale": "mean/n",
    "hpal_form": "unit-mean",
    "retrain_classifier": True,
    "lr": 0.1,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "augment": "batch",
    "width": 32,
    "scenario": "nid1-equalised",
}


def sentence(**keys):
    """What configure says to a mistake: always one line."""
    with pytest.raises(ConfigError) as caught:
        configure(**keys)
    message = str(caught.value)
    assert message and "\n" not in message and "pydantic" not in message
    return message


@pytest.fixture
def other_method(monkeypatch):
    """A second method with a key of its own."""
    monkeypatch.setattr(module, "METHODS", dict(METHODS))

    @dataclasses.dataclass(frozen=True)
    class Other(Method):
        pull: Positive = 0.5

    module.METHODS["other"] = Other
    return "other"


# defaults and presets


def test_defaults():
    config = configure()
    assert config == Config(parameters=method_keys("fedhpro-plus"))
    assert (config.method, config.data, config.scenario, config.model) == (
        "fedhpro-plus",
        "digits-lite",
        "domains",
        "resnet10",
    )
    assert (config.rounds, config.local_epochs, config.batch_size, config.lr) == (15, 5, 16, 0.03)
    assert (config.width, config.dim, config.workers, config.participation) == (16, None, None, 1.0)
    assert config.flat() == {k: v for k, v in config if k != "parameters"} | method_keys("fedhpro-plus")
    assert config.build_method() == METHODS["fedhpro-plus"]()


def test_without_a_method_its_own_keys_ask_for_the_papers():
    for keys in ({"M": 0}, {"hpal": "off"}, {"uplink": "probabilities", "tau": 0.1}, {"exchange": "classifier"},
                 {"model": "htfe2", "exchange": "auto"}):  # fmt: skip
        assert configure(**keys) == configure(**keys, method="fedhpro")
    for keys in ({"tau": 0.1}, {"exchange": "model"}, {"agreed": False}, {"model": "cnn"}, {"data": "docs-lite"}):
        assert configure(**keys) == configure(**keys, method="fedhpro-plus")
    assert configure(M=0, preset="paper").method == "fedhpro"
    with pytest.raises(ConfigError, match=r"'M' is a key of method fedhpro or .*, and this run's method is fedavg"):
        configure(M=0, method="fedavg")
    with pytest.raises(ConfigError, match=r"'M' is a key of .*, and this run's method is fedhpro-plus"):
        configure(M=0, preset="plus")
    assert configure(method=None, M=0) == configure(M=0)
    because = "'agreed' is a key of method fedhpro-plus, and this run's method is fedhpro, since M is a key of it"
    with pytest.raises(ConfigError, match=because):
        configure(M=0, agreed=False)
    with pytest.raises(ConfigError, match="model=htfe2 does not go with fedhpro-plus"):
        configure(model="htfe2", agreed=False)
    with pytest.raises(ConfigError, match=r"hpal=False: .* \(method fedhpro, since hpal is a key of it\)"):
        configure(hpal=False)


def test_a_method_that_other_keys_chose_is_said():
    assert chosen_unnamed({"M": 0}) == "no method is named: fedhpro, since M is a key of it"
    assert "exchange=classifier does not go with fedhpro-plus" in str(chosen_unnamed({"exchange": "classifier"}))
    for keys in ({}, {"lr": 0.1, "model": "cnn"}, {"M": 0, "method": "fedhpro"}, {"M": 0, "preset": "paper"}):
        assert chosen_unnamed(keys) is None
    for value in ("prototypes", "nothing", "none", ["model"]):  # which the paper's method does not exchange either
        assert chosen_unnamed({"exchange": value}) is None
    assert configure(exchange="prototypes").method == "fedhpro-plus"  # which says who exchanges them


def test_strings_of_the_command_line_become_values():
    config = configure(rounds="3", lr="1e-3", width="none", dim="64", retrain_classifier="true", tau="0.1", M="0")
    assert (config.rounds, config.lr, config.width, config.dim) == (3, 0.001, None, 64)
    assert (config.parameters["retrain_classifier"], config.parameters["tau"], config.parameters["M"]) == (True, 0.1, 0)


@pytest.mark.parametrize("name,documented", [("paper", PAPER), ("released", RELEASED)])
def test_presets_set_the_documented_values(name, documented):
    flat = configure(preset=name).flat()
    assert {key: flat[key] for key in documented} == documented
    untouched = flat.keys() - PRESETS[name].keys()
    assert {key: flat[key] for key in untouched} == {key: configure().flat()[key] for key in untouched}


def test_paper_is_the_method_as_its_defaults_have_it():
    assert configure(preset="paper").build_method() == METHODS["fedhpro"]()


@pytest.mark.parametrize("name", PRESETS)
def test_keys_win_over_a_preset(name):
    plain = configure(preset=name).flat()
    assert configure(preset=name, lr=0.5, tau=0.1, width=None).flat() == plain | {"lr": 0.5, "tau": 0.1, "width": None}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_with_another_method_keeps_its_training_keys(name):
    config, plain = configure(preset=name, method="fedavg"), configure(preset=name).flat()
    own = method_keys(plain["method"])
    assert config.flat() == {key: plain[key] for key in plain if key not in own} | {"method": "fedavg"}
    assert config.parameters == {}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_real_keys_and_settle_all_of_the_methods(name):
    method = PRESETS[name]["method"]
    assert PRESETS[name].keys() <= configure(method=method).flat().keys()
    assert method_keys(method).keys() <= PRESETS[name].keys()


@pytest.mark.parametrize("method", METHODS)
def test_no_parameter_of_a_method_shadows_a_key(method):
    assert not method_keys(method).keys() & {*Config.model_fields, "preset"}
    assert configure(method=method).build_method() == METHODS[method]()


# mistakes


@pytest.mark.parametrize(
    "keys,message",
    [
        ({"method": "fedhpr"}, "there is no method 'fedhpr': did you mean 'fedhpro'?"),
        ({"method": "FedHPro"}, "there is no method 'FedHPro': did you mean 'fedhpro'?"),
        ({"m": 0}, "there is no key 'm': did you mean 'M'? `fedhpro run --keys` lists all"),
        ({"data": "digit-lite"}, "there is no data 'digit-lite': did you mean 'digits-lite'?"),
        ({"model": "resnet_18"}, "there is no model 'resnet_18': did you mean 'resnet18'?"),
        ({"stem": "3x3/3"}, "there is no stem '3x3/3': did you mean '3x3/2'?"),
        ({"preset": "papr"}, "there is no preset 'papr': did you mean 'paper'?"),
        ({"preset": "xyz"}, "there is no preset 'xyz': choose one of paper, plus, released"),
        ({"local_epoch": 3}, "there is no key 'local_epoch': did you mean 'local_epochs'?"),
        ({"hpcl_scael": 3}, "there is no key 'hpcl_scael': did you mean 'hpcl_scale'?"),
        ({"perset": "paper"}, "there is no key 'perset': did you mean 'preset'?"),
        (
            {"method": "fedavg", "M": 3},
            "'M' is a key of method fedhpro or fedproto-hp or fedtgp-hp or fedgmkd-hp or fedsa-hp, "
            "and this run's method is fedavg",
        ),
        ({"method": "fedavg", "mu": 3}, "'mu' is a key of method fedprox or moon, and this run's method is fedavg"),
    ],
)
def test_unknown_names_come_with_the_closest(keys, message):
    assert sentence(**keys).startswith(message)


@pytest.mark.parametrize("key", ["method", "data", "model", "stem", "preset"])
@pytest.mark.parametrize("value", [None, 3, ["paper"], {"a": 1}])
def test_names_of_a_wrong_type(key, value):
    if value is not None or key not in ("preset", "method"):  # which is no preset, and the default method
        assert sentence(**{key: value}).startswith(f"there is no {key} {value!r}: ")


@pytest.mark.parametrize(
    "key,value",
    [
        ("rounds", 0),
        ("rounds", "3.5"),
        ("rounds", [3]),
        ("lr", -1),
        ("lr", "fast"),
        ("lr", "nan"),
        ("lr", "inf"),
        ("alpha", float("inf")),
        ("participation", 1.5),
        ("participation", 0),
        ("momentum", 1),
        ("held_out", 1),
        ("batch_size", 1),
        ("width", "abc"),
        ("seed", -1),
        ("min_samples", 0),
        ("workers", -1),
        ("scenario", "foo"),
        ("augment", "some"),
        ("engine", "gpu"),
        ("M", -1),
        ("I", 0),
        ("tau", 0),
        ("tau", "inf"),
        ("hyper_scale", "nan"),
        ("hpcl", "yes"),
        ("retrain_classifier", "maybe"),
    ],
)
def test_values_out_of_range(key, value):
    assert sentence(**{key: value}).startswith(f"{key}={value}: input should be ")


def test_sentences_stay_one_short_line_whatever_is_given():
    assert sentence(rounds=None).startswith("rounds=none: ")
    assert sentence(lr="a\n b") == "lr=a b: input should be a valid number"
    assert len(sentence(scenario="x" * 10_000)) < 250


@pytest.mark.parametrize(
    "key,value", [("epsilon", 1), ("noise", "4"), ("clip", 2), ("clip_report", 0.5), ("delta", 1e-6)]
)
def test_keys_of_privacy_are_refused_where_nothing_is_protected(key, value):
    words = f"{key}={float(value):g} protects nothing by itself: give privacy=central or privacy=local too"
    assert sentence(**{key: value}) == sentence(**{key: value}, privacy="off") == words
    assert getattr(configure(**{key: value}, privacy="central"), key) == float(value)
    usual = getattr(configure(), key)  # as every config.toml has it
    assert getattr(configure(**{key: "none" if usual is None else usual}), key) == usual


def test_choices_are_listed():
    assert sentence(scenario="foo").endswith("'nid1-equalised', 'nid2', 'shards' or 'ag-nid'")


def test_configs_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        configure().rounds = 3


# command line


def test_parse():
    assert parse(["rounds=3", "out=a=b", "dim="]) == {"rounds": "3", "out": "a=b", "dim": ""}
    assert parse([]) == {}


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["rounds"], "'rounds' is not a setting: write it as key=value"),
        (["=3"], "'=3' is not a setting: write it as key=value"),
        (["lr=1", "rounds=3", "lr=1"], "lr is given twice"),
    ],
)
def test_parse_mistakes(arguments, message):
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    assert str(caught.value) == message


# TOML


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"preset": "paper"},
        {"preset": "plus"},
        {"preset": "released"},
        {"preset": "released", "method": "fedavg"},
        {"width": None, "dim": 128, "workers": 0, "seed": 2**63},
        {"lr": 1e-12, "weight_decay": 0.0, "tau": 1e300, "participation": 1 / 3},
    ],
)
def test_toml_round_trip(keys):
    config = configure(**keys)
    assert configure(**tomllib.loads(config.to_toml())) == config


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: text != "none"))
def test_toml_round_trip_of_any_path(out):
    config = configure(out=out)
    assert configure(**tomllib.loads(config.to_toml())) == config


def test_toml_has_every_key_on_a_line_of_its_own():
    config = configure(method="fedhpro", out='C:\\runs\\"best"')
    lines = config.to_toml().splitlines()
    assert [line.partition(" = ")[0] for line in lines] == list(config.flat())
    assert 'out = "C:\\\\runs\\\\\\"best\\""' in lines
    assert 'dim = "none"' in lines
    assert "retrain_classifier = false" in lines


def test_load_reads_a_file_or_a_run_folder(tmp_path):
    config = configure(preset="released", seed=3)
    (tmp_path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    assert load(tmp_path / "config.toml") == config
    assert load(tmp_path) == config


@pytest.mark.parametrize(
    "content,message",
    [
        (None, "there is no config at "),
        (b"rounds = ", "is not valid TOML: "),
        (b"\xff\xfe", "is not valid TOML: "),
        (b"rounds = 0", "rounds=0: "),
        (b"[fedhpro]\nM = 3", "there is no key 'fedhpro'"),
    ],
)
def test_load_mistakes(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.toml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "config.toml")
    assert message in str(caught.value)


# replace


def test_replace_keeps_the_rest():
    config = configure(preset="released", seed=4)
    changed = config.replace(rounds=3, tau=0.2)
    assert changed.flat() == config.flat() | {"rounds": 3, "tau": 0.2}
    assert config.rounds == 100
    assert config.replace() == config
    assert config.replace(method="fedhpro") == config


def test_defaults_of_a_method_that_go_by_other_keys_follow_them():
    assert configure().replace(privacy="central") == configure(privacy="central")
    assert configure().replace(model="textcnn") == configure(model="textcnn")
    assert configure(privacy="central").replace(privacy="off") == configure()
    assert configure(tau=0.2, contrasted=False).replace(privacy="local").parameters["contrasted"] is False


def test_replace_checks():
    with pytest.raises(ConfigError, match="rounds=0"):
        configure().replace(rounds=0)
    with pytest.raises(ConfigError, match="there is no preset"):
        configure().replace(preset="papier")


def test_replace_with_another_method_starts_from_its_defaults(other_method):
    config = configure(M=3, rounds=7)
    other = config.replace(method=other_method)
    assert (other.rounds, other.parameters) == (7, {"pull": 0.5})
    assert config.replace(method=other_method, pull=2).parameters == {"pull": 2.0}
    assert other.replace(method="fedhpro").parameters == method_keys("fedhpro")
    with pytest.raises(ConfigError, match=r"'M' is a key of method fedhpro or .*-hp, and this run's method is other"):
        config.replace(method=other_method, M=3)


def test_replace_with_a_preset_takes_its_keys(other_method):
    config = configure(seed=4, lr=0.5, M=3)
    assert config.replace(preset="paper") == configure(preset="paper", seed=4)
    assert config.replace(preset="paper", lr=0.2) == configure(preset="paper", seed=4, lr=0.2)
    other = configure(method=other_method, pull=2, seed=4)
    assert other.replace(preset="paper") == configure(preset="paper", seed=4)
    assert other.replace(preset="paper", method=other_method) == configure(
        preset="paper", method=other_method, pull=2, seed=4
    )


def test_other_data_brings_its_own_defaults():
    assert configure().replace(data="docs-lite") == configure(data="docs-lite")
    kept = configure(rounds=3, lr=0.5).replace(data="docs-lite")
    assert (kept.rounds, kept.lr, kept.model) == (3, 0.5, "textcnn")
