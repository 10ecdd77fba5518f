"""What is installed is pinned and hashed; what is imported runs no code of strangers and calls nobody."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PRODUCT = sorted(path for folder in ("fedhpro", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))

# --- the lock file -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked():
    """Name -> version, and the hashes of each."""
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = {}
    for line in lines:
        name, version, hashes = re.fullmatch(r"([\w.-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})+)\s*", line).groups()
        found[canonicalize_name(name)] = version, hashes.split()
    return found


def test_every_line_of_the_lock_has_one_version_and_hashes(locked):
    assert len(locked) > 50
    assert all(hashes for _, hashes in locked.values())


def test_the_lock_is_up_to_date_with_pyproject_and_constraints(locked):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["flower"], *extras["privacy"]]
    for requirement in map(Requirement, wanted):
        version, _ = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"make lock: {requirement} is not what is locked, {version}"
    pins = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    for name, version in pins:
        found = locked.get(canonicalize_name(name))
        assert found is None or Version(found[0]).public == version, f"make lock: {name} is locked as {found[0]}"


def test_the_lock_pulls_no_gpu_libraries(locked):
    assert Version(locked["torch"][0]).local == "cpu"
    assert not [name for name in locked if name.startswith("nvidia-")]


# --- the code ------------------------------------------------------------------------------------------------------

FORBIDDEN = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "os.system": "is a shell",
    "os.popen": "is a shell",
    "subprocess.getoutput": "is a shell",
    "subprocess.getstatusoutput": "is a shell",
    "pickle.load": "runs what the file says",
    "pickle.loads": "runs what the bytes say",
    "pickle.Unpickler": "runs what the file says",
    "marshal.loads": "runs what the bytes say",
    "shelve.open": "is pickle",
    "joblib.load": "is pickle",
    "torch.load": "is pickle, but for weights_only",
    "yaml.load": "builds any object",
    "tempfile.mktemp": "is a race",
    "ssl._create_unverified_context": "trusts everybody",
}


def faults(source):
    """Calls that product code must not have, in words."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, keywords = ast.unparse(node.func), {word.arg: word.value for word in node.keywords}
        values = {arg: getattr(value, "value", None) for arg, value in keywords.items()}
        if name in FORBIDDEN and not (name == "torch.load" and values.get("weights_only") is True):
            found.append(f"line {node.lineno}: {name} {FORBIDDEN[name]}")
        if "shell" in keywords and values["shell"] is not False:
            found.append(f"line {node.lineno}: {name} with a shell")
        if "allow_pickle" in keywords and values["allow_pickle"] is not False:
            found.append(f"line {node.lineno}: {name} with pickles")
        if "verify" in keywords and values["verify"] is False:
            found.append(f"line {node.lineno}: {name} without a look at the certificate")
        if name in ("np.load", "numpy.load") and "allow_pickle" not in keywords:
            found.append(f"line {node.lineno}: {name} must say allow_pickle=False")
    return found


@pytest.mark.parametrize(
    "line",
    [
        "eval('1')",
        "subprocess.run('ls', shell=True)",
        "subprocess.Popen('ls', shell=quiet)",
        "pickle.load(file)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "httpx.get(url, verify=False)",
    ],
)
def test_the_check_finds_what_it_is_for(line):
    assert faults(line)


@pytest.mark.parametrize("line", ["net.eval()", "torch.load(p, weights_only=True)", "np.load(p, allow_pickle=False)"])
def test_the_check_leaves_the_harmless_alone(line):
    assert not faults(line)


def test_product_code_runs_no_shell_no_text_and_no_pickle():
    found = {str(path.relative_to(ROOT)): faults(path.read_text(encoding="utf-8")) for path in PRODUCT}
    assert len(found) > 90
    assert {name: what for name, what in found.items() if what} == {}


def test_names_are_not_hidden_by_imports():
    """`from pickle import load` would slip through a check that goes by dotted names."""
    modules = {name.rpartition(".")[0] for name in FORBIDDEN} - {""} | {"dill", "cloudpickle"}
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in modules and node.level == 0:
                assert not {f"{node.module}.{alias.name}" for alias in node.names} & FORBIDDEN.keys(), path
            if isinstance(node, ast.Import):
                assert not [a.name for a in node.names if a.name in modules and a.asname], path


def test_the_one_reader_of_pickles_builds_arrays_and_nothing_else():
    """CIFAR comes as pickles: its reader (data/importers.py; test_importers.py attacks it) names what it may build."""
    users = [path for path in PRODUCT if re.search(r"^\s*import (pickle|dill)", path.read_text(), flags=re.MULTILINE)]
    assert [path.name for path in users] == ["importers.py"]
    classes = [node for node in ast.parse(users[0].read_text()).body if isinstance(node, ast.ClassDef)]
    (reader,) = [node for node in classes if [ast.unparse(base) for base in node.bases] == ["pickle.Unpickler"]]
    assert "find_class" in [part.name for part in reader.body if isinstance(part, ast.FunctionDef)]


NO_NETWORK = """
import importlib, pkgutil, socket, sys, types

def refuse(*_, **__):
    raise AssertionError("the network was asked for at import")

class NoSocket(socket.socket):
    def __init__(self, family=-1, *arguments, **more):
        if family not in (socket.AF_UNIX,):
            refuse()
        super().__init__(family, *arguments, **more)

socket.socket = NoSocket
socket.create_connection = socket.getaddrinfo = socket.gethostbyname = refuse
import fedhpro
names = [module.name for module in pkgutil.walk_packages(fedhpro.__path__, "fedhpro.")]
loaded = 0
for name in names:
    if ".peers" in name or name.endswith(("__main__", "engines.fused")):  # scripts, and what needs a GPU
        continue
    try:
        importlib.import_module(name)
        loaded += 1
    except ModuleNotFoundError as error:  # of an extra that is not here
        assert not error.name.startswith("fedhpro"), error
print(loaded)
"""


def test_nothing_is_asked_of_the_network_at_import():
    done = subprocess.run([sys.executable, "-c", NO_NETWORK], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 60


def test_the_tests_that_security_md_names_are_there():
    named = set(re.findall(r"`(tests/\w+\.py)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8")))
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).is_file()] == []
