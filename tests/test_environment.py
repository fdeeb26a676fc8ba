"""pyproject.toml, environment.yml and constraints.txt describe one environment."""

import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONDA_NAMES = {"pytorch": "torch", "matplotlib-base": "matplotlib"}


def specifiers(requirements: list[str]) -> dict[str, SpecifierSet]:
    return {canonicalize_name(r.name): r.specifier for r in map(Requirement, requirements)}


def pyproject() -> dict[str, SpecifierSet]:
    project = PROJECT["project"]
    return specifiers(project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra])


def environment_yml() -> tuple[list[str], list[str]]:
    entries = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    return [e for e in entries if isinstance(e, str)], next(e["pip"] for e in entries if isinstance(e, dict))


def pins() -> dict[str, SpecifierSet]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return specifiers([x for x in lines if x and not x.startswith("#")])


def test_environment_yml_holds_exactly_what_pyproject_asks_for():
    """A dependency or range changed on one side alone fails here, whichever side it is."""
    conda, pip = environment_yml()
    have = specifiers([CONDA_NAMES.get(e.split()[0], e.split()[0]) + "".join(e.split()[1:]) for e in conda])
    have |= specifiers([e for e in pip if e != "-e ."])
    assert have.pop("python") == SpecifierSet(PROJECT["project"]["requires-python"])
    assert have.pop("setuptools") == specifiers(PROJECT["build-system"]["requires"])["setuptools"]
    have.pop("pip")
    assert have == pyproject()


def test_environment_yml_installs_k3lab_itself():
    assert environment_yml()[1][-1] == "-e ."


def test_constraints_pin_every_dependency_inside_its_range():
    pinned = pins()
    for name, wanted in pyproject().items():
        assert name in pinned, f"constraints.txt does not pin {name}"
        (pin,) = pinned[name]
        assert wanted.contains(Version(pin.version)), f"constraints.txt pins {name} to {pin.version}, pyproject.toml asks for {wanted}"


def test_constraints_are_exact_and_name_no_build():
    """A pin such as torch==2.13.0+cpu would refuse the CUDA and ROCm builds of the same version."""
    for name, spec in pins().items():
        (pin,) = spec
        assert pin.operator == "==", f"{name}{spec} is not an exact pin"
        assert Version(pin.version).local is None, f"{name}{spec} names a build"
    assert "k3lab" not in pins()


@pytest.mark.parametrize("target", ["run", "test", "browser", "lab", "render", "check"])
def test_every_make_target_of_the_readme_builds_the_environment_first(target):
    rules = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(f"{target}:")]
    assert rules == [f"{target}: $(STAMP)"]
    assert f"make {target}" in (ROOT / "README.md").read_text()
