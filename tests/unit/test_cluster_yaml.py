"""cluster.yaml against Ray's own schema and EC2's own parameters, without a word to AWS."""

import copy
import shlex
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


def prepared(written: dict[str, Any]) -> dict[str, Any]:
    """The configuration as `ray up` completes and checks it before it asks AWS anything."""
    config = prepare_config(copy.deepcopy(written))
    validate_config(config)
    return config


def problems_of(node_config: dict[str, Any]) -> str:
    """What EC2's RunInstances would not accept in the shape of `node_config`."""
    client = botocore.session.Session().create_client(
        "ec2", region_name="us-west-2", aws_access_key_id="none", aws_secret_access_key="none"
    )
    shape = client.meta.service_model.operation_model("RunInstances").input_shape
    return ParamValidator().validate(node_config | {"MinCount": 1, "MaxCount": 1}, shape).generate_report()


def test_ray_accepts_it(written: dict[str, Any]) -> None:
    config = prepared(written)
    assert config["head_node_type"] == "head"
    assert config["available_node_types"]["gpu"]["max_workers"] <= config["max_workers"]


def test_ray_refuses_what_it_does_not_know(written: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="'setup_comands' was unexpected"):
        prepared(written | {"setup_comands": []})


@pytest.mark.parametrize("node_type", ["head", "gpu"])
def test_ec2_knows_every_parameter(written: dict[str, Any], node_type: str) -> None:
    node_config = written["available_node_types"][node_type]["node_config"]
    assert problems_of(node_config) == ""
    assert "IamInstanceProfil" in problems_of(node_config | {"IamInstanceProfil": {}})


def test_workers_are_spot_and_the_head_trains_nothing(written: dict[str, Any]) -> None:
    types = written["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 0}
    assert "InstanceMarketOptions" not in types["head"]["node_config"]
    assert types["gpu"]["min_workers"] == 0
    assert types["gpu"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert all("Name" in node["node_config"]["IamInstanceProfile"] for node in types.values())


def test_every_node_gets_the_token_and_the_tested_versions(written: dict[str, Any]) -> None:
    for here in written["file_mounts"].values():
        assert here.startswith("~") or (ROOT / here).is_file()
    assert written["file_mounts"]["/home/ubuntu/.ray/auth_token"] == "~/.ray/auth_token"
    config = prepared(written)
    for role in ("head", "worker"):
        setup = config[f"{role}_setup_commands"]  # Ray has put setup_commands before them
        assert any("RAY_AUTH_MODE=token" in command for command in setup)
        installs = [shlex.split(command) for command in setup if "pip install" in command]
        assert installs
        assert all("constraints.txt" in words for words in installs)
