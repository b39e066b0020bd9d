"""Names never collide, fit everywhere, and groups and folders are handed out without a clash."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_operator.api.rules import LONGEST_NAME
from kvpool_operator.desired import names, sockets
from kvpool_operator.desired.children import children
from kvpool_wire import rpc
from unit.operator.desired.builders import facts, pool
from unit.operator.desired.cases import ETCD

pool_names = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)
awkward_names = st.sampled_from(
    [
        "a",
        "a-master",
        "a-agent",
        "a-masters",
        "a-engine",
        "a-agent-agent",
        "a-master-master",
        "a-agent-00000000",
    ]
)
node_names = st.from_regex(
    r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?){0,12}", fullmatch=True
)


@given(st.lists(st.one_of(pool_names, awkward_names), min_size=2, max_size=4, unique=True))
def test_children_of_different_pools_never_share_a_kind_and_a_name(chosen: list[str]) -> None:
    found = [
        (manifest["kind"], manifest["metadata"]["name"])
        for name in chosen
        for manifest in children(pool(name=name), facts(nodes=("node-0", "a.b"))).manifests
    ]
    assert len(set(found)) == len(found)


@given(st.lists(st.tuples(pool_names, node_names), min_size=2, max_size=6, unique=True))
def test_nodes_of_pools_never_share_a_name(pairs: list[tuple[str, str]]) -> None:
    found = [names.node_object(pool(name=name), node) for name, node in pairs]
    assert len(set(found)) == len(found)
    assert all(len(name) <= 253 and name[-1].isalnum() for name in found)


def test_a_pool_and_a_node_do_not_borrow_from_each_other() -> None:
    """`a-b` on `c` and `a` on `b-c` are two things."""
    assert names.node_object(pool(name="a-b"), "c") != names.node_object(pool(name="a"), "b-c")


def test_the_longest_name_leaves_room_for_what_kubernetes_appends() -> None:
    for manifest in children(pool(ETCD, name="a" * LONGEST_NAME), facts()).manifests:
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "StatefulSet":
            # controller-revision-hash and pod-name labels hold the name, a dash and up to ten characters.
            assert len(name) + 11 <= 63
        if manifest["kind"] == "Service":
            assert len(name) <= 63
        assert all(len(value) <= 63 for value in manifest["metadata"]["labels"].values())


@given(st.uuids().map(str), st.uuids().map(str))
def test_a_pools_folder_is_its_own_and_short_enough_for_a_socket(one: str, other: str) -> None:
    root = "/" + "r" * (sockets.LONGEST_ROOT - 1)
    folder = sockets.folder(root, one)
    assert (folder == sockets.folder(root, other)) == (one == other)
    assert all(len(f"{folder}/{name}".encode()) <= 107 for name in (rpc.RPC_SOCKET, rpc.DESCRIPTOR_SOCKET))


@pytest.mark.parametrize("root", ["", "run/kvpool", "/" + "r" * sockets.LONGEST_ROOT, "/" + "ä" * 40])
def test_a_root_that_is_no_short_absolute_path_is_refused(root: str) -> None:
    with pytest.raises(ValueError, match="an absolute path of at most"):
        sockets.folder(root, "uid")


@given(st.lists(st.uuids().map(str), min_size=1, max_size=40, unique=True))
def test_no_two_pools_get_one_group(uids: list[str]) -> None:
    taken: dict[str, int] = {}
    for uid in uids:
        taken[uid] = sockets.allot_gid(uid, taken.values())
    assert len(set(taken.values())) == len(uids)
    assert all(sockets.FIRST_GID <= gid <= sockets.LAST_GID for gid in taken.values())


def test_a_group_is_the_same_again_and_moves_on_only_when_it_is_taken() -> None:
    first = sockets.allot_gid("uid", ())
    assert sockets.allot_gid("uid", ()) == first
    second = sockets.allot_gid("uid", [first])
    wrapped = first + 1 if first < sockets.LAST_GID else sockets.FIRST_GID
    assert second == wrapped


def test_when_no_group_is_left_it_says_so() -> None:
    everything = range(sockets.FIRST_GID, sockets.LAST_GID + 1)
    with pytest.raises(sockets.NoGroupLeftError, match="delete one that is not used"):
        sockets.allot_gid("uid", everything)
