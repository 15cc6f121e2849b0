"""Mesh texts, logical axes and plans."""

import pytest
from jax.sharding import PartitionSpec

from jaxinfer.sharding.mesh import MeshShape, make, parse
from jaxinfer.sharding.rules import Plan, Rules


@pytest.mark.parametrize(
    "text, shape",
    [
        ("", MeshShape()),
        ("cp=8", MeshShape(cp=8)),
        (" dp=2 , cp=4", MeshShape(dp=2, cp=4)),
        ("tp=2,cp=4", MeshShape(tp=2, cp=4)),
    ],
)
def test_meshes_parse(text: str, shape: MeshShape):
    assert parse(text) == shape
    assert parse(str(shape)) == shape


@pytest.mark.parametrize(
    "text, message",
    [
        ("pp=2", "pipeline"),
        ("cp", "axis=size"),
        ("xp=2", "axis=size with an axis of dp, cp, ep, tp"),
        ("cp=0", "positive"),
        ("cp=two", "positive"),
        ("cp=2,cp=4", "twice"),
    ],
)
def test_meshes_that_are_none_are_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_a_mesh_larger_than_the_machine_is_refused_with_what_is_possible():
    with pytest.raises(ValueError, match=r"needs 16 devices, but there are 8 .* 1 to 8"):
        make(parse("cp=16"))


def test_what_divides_is_divided_and_the_rest_replicated():
    rules = Rules(parse("cp=4,ep=2"))
    assert rules.spec(("experts", None, "expert_mlp", None), (8, 2, 6, 16)) == PartitionSpec(
        ("cp", "ep"), None, None, None
    )
    assert rules.axes("experts", 12) == ("cp",)
    assert rules.axes("experts", 6) == ("ep",)
    assert rules.axes("experts", 7) == ()
    assert rules.replicated_because("experts", 8) is None
    assert "experts=6" in (rules.replicated_because("experts", 6) or "")


def test_dense_weights_are_divided_at_rest_and_gathered_for_prefill():
    rules = Rules(parse("tp=2,cp=4"), shard_dense=True)
    assert rules.axes("heads", 16) == ("tp", "cp")
    assert Plan.prefill(rules).axes("heads", 16) == ("tp",)
    assert Plan.decode(rules).axes("heads", 16) == ("tp", "cp")
    # Four heads do not divide by eight: the largest set of axes that divides them is taken, and prefill gathers it.
    assert rules.axes("heads", 4) == ("cp",)
    assert Plan.prefill(rules).axes("heads", 4) == ()


def test_two_dimensions_on_one_mesh_axis_collide():
    rules = Rules(parse("cp=4,ep=2"))
    with pytest.raises(ValueError, match=r"collide on mesh axes \['cp', 'ep'\]"):
        rules.spec(("experts", "vocab"), (8, 512))
    with pytest.raises(ValueError, match="a name for each dimension"):
        rules.spec(("experts",), (8, 512))
    with pytest.raises(ValueError, match="logical axis"):
        rules.spec(("heds",), (8,))
