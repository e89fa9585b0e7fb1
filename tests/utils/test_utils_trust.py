"""Who could have written a file: owners and modes, on the way to it and below it."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest
from other_users import (
    NOBODY,
    STRANGE_GROUP,
    STRANGER,
    act_as,
    give_away,
    make_open_folder,
    needs_root,
)

from echelon.utils.trust import (
    TRUST_VARIABLE,
    find_folder_trust_problem,
    find_owner_trust_problem,
    find_tree_trust_problem,
    find_trust_problem,
    make_trusted_folder,
)


@pytest.fixture
def shared() -> Iterator[Path]:
    with make_open_folder() as folder:
        yield folder


def make_file(path: Path, mode: int = 0o644) -> Path:
    path.write_text("print()")
    path.chmod(mode)
    return path


def test_a_file_of_our_own_is_trusted_and_one_that_is_not_there(shared: Path) -> None:
    assert find_trust_problem(make_file(shared / "own.py")) is None
    assert find_trust_problem(shared / "missing") is None
    for below_a_file in (shared / "own.py" / "a", shared / "own.py" / "a" / "b"):
        assert find_trust_problem(below_a_file) is None
        assert find_owner_trust_problem(below_a_file) is None
        assert find_folder_trust_problem(below_a_file) is None


@needs_root
def test_a_file_of_somebody_else_is_not(shared: Path) -> None:
    give_away(make_file(shared / "his.py"))
    problem = find_trust_problem(shared / "his.py")
    assert problem
    assert f"{shared}/his.py belongs to {STRANGER}" in problem.what
    assert f"{TRUST_VARIABLE}={STRANGER}" in problem.do


@needs_root
def test_a_file_of_root_is_trusted_by_everybody(shared: Path) -> None:
    make_file(shared / "roots.py")
    give_away(make_file(shared / "his.py"))
    with act_as(NOBODY):
        assert find_trust_problem(shared / "roots.py") is None
        assert find_trust_problem(shared / "his.py")


def test_a_file_that_everybody_may_write(shared: Path) -> None:
    problem = find_trust_problem(make_file(shared / "open.py", 0o666))
    assert problem
    assert "may be written by everybody (mode 0666)" in problem.what
    assert f"chmod go-w {shared}/open.py" in problem.do


@needs_root
def test_a_group_may_write_if_it_is_the_owners_alone(shared: Path) -> None:
    own = make_file(shared / "own.py", 0o664)
    assert find_trust_problem(own) is None, "the group of root has no other member"
    os.chown(own, 0, STRANGE_GROUP)
    problem = find_trust_problem(own)
    assert problem
    assert f"the group {STRANGE_GROUP} (mode 0664)" in problem.what
    os.chown(own, STRANGER, STRANGER)
    with act_as(STRANGER):
        assert find_trust_problem(own) is None, "a user without a name has the group of her number"


def test_modes_do_not_matter_where_nobody_else_comes(shared: Path) -> None:
    (shared / "closed" / "inner").mkdir(parents=True)
    file = make_file(shared / "closed" / "inner" / "open.py", 0o666)
    assert find_trust_problem(file)
    (shared / "closed").chmod(0o700)
    assert find_trust_problem(file) is None


@needs_root
def test_somebody_elses_file_is_not_trusted_where_nobody_else_comes(tmp_path: Path) -> None:
    give_away(make_file(tmp_path / "his.py"))
    assert find_trust_problem(tmp_path / "his.py")


@needs_root
def test_users_and_groups_can_be_trusted_on_purpose(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_away(make_file(shared / "his.py"))
    os.chown(make_file(shared / "ours.py", 0o664), 0, STRANGE_GROUP)
    for words, trusts_him, trusts_them in [
        ("", False, False),
        (f"{STRANGER}", True, False),
        (f"somebody, @{STRANGE_GROUP}", False, True),
        (f"@{STRANGE_GROUP},{STRANGER}", True, True),
    ]:
        monkeypatch.setenv(TRUST_VARIABLE, words)
        assert (find_trust_problem(shared / "his.py") is None) is trusts_him, words
        assert (find_trust_problem(shared / "ours.py") is None) is trusts_them, words


@needs_root
def test_the_members_of_a_trusted_group_are_trusted(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = next((u for u in pwd.getpwall() if u.pw_uid not in (0, os.geteuid())), None)
    assert user, "every system has users beside root"
    os.chown(make_file(shared / "his.py"), user.pw_uid, user.pw_gid)
    assert find_trust_problem(shared / "his.py")
    monkeypatch.setenv(TRUST_VARIABLE, f"@{grp.getgrgid(user.pw_gid).gr_name}")
    assert find_trust_problem(shared / "his.py") is None
    monkeypatch.setenv(TRUST_VARIABLE, user.pw_name)
    assert find_trust_problem(shared / "his.py") is None


# --- folders ---


def test_the_sticky_bit_protects_what_is_below_but_not_the_folder_itself(shared: Path) -> None:
    (shared / "tmp" / "mine").mkdir(parents=True)
    (shared / "tmp").chmod(0o1777)
    assert find_folder_trust_problem(shared / "tmp" / "mine") is None
    problem = find_folder_trust_problem(shared / "tmp")
    assert problem
    assert "everybody" in problem.what, "anybody can make the next file in it"
    (shared / "tmp").chmod(0o777)
    problem = find_folder_trust_problem(shared / "tmp" / "mine")
    assert problem
    assert f"{shared}/tmp may be written" in problem.what, "anybody can rename `mine`"


@needs_root
def test_whoever_owns_a_folder_above_can_replace_what_is_below(shared: Path) -> None:
    (shared / "his" / "mine").mkdir(parents=True)
    os.chown(shared / "his", STRANGER, STRANGER)
    problem = find_folder_trust_problem(shared / "his" / "mine")
    assert problem
    assert f"{shared}/his belongs to {STRANGER}" in problem.what


@needs_root
def test_a_link_is_as_good_as_its_owner_and_what_it_leads_through(shared: Path) -> None:
    (shared / "tmp").mkdir()
    (shared / "tmp").chmod(0o1777)
    (shared / "mine").mkdir()
    link = shared / "tmp" / "link"
    link.symlink_to("../mine")
    assert find_folder_trust_problem(link) is None
    (shared / "relative").symlink_to("tmp/link/../mine")
    assert find_folder_trust_problem(shared / "relative") is None
    give_away(link)
    for path in (link, shared / "relative"):
        problem = find_folder_trust_problem(path)
        assert problem
        assert f"{link} belongs to {STRANGER}" in problem.what, "he can turn it anywhere"


def test_links_that_go_in_circles_end(shared: Path) -> None:
    (shared / "a").symlink_to("b")
    (shared / "b").symlink_to("a")
    assert find_folder_trust_problem(shared / "a" / "c") is None, "nothing is there to be used"


def test_a_folder_that_is_not_there_is_judged_by_those_above(shared: Path) -> None:
    assert find_folder_trust_problem(shared / "new" / "folder") is None
    shared.chmod(0o777)
    assert find_folder_trust_problem(shared / "new" / "folder")


def test_folders_that_we_make_are_closed_to_others_whatever_the_umask(shared: Path) -> None:
    before = os.umask(0)
    try:
        make_trusted_folder(shared / "a" / "b", mode=0o700)
        make_trusted_folder(shared / "a" / "b")
    finally:
        os.umask(before)
    assert (shared / "a").stat().st_mode & 0o777 == 0o755
    assert (shared / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert find_folder_trust_problem(shared / "a" / "b") is None


# --- trees ---


def test_one_file_deep_in_a_tree_is_enough(shared: Path) -> None:
    deep = shared / "env" / "lib" / "python3" / "site-packages"
    deep.mkdir(parents=True)
    for number in range(5):
        make_file(deep / f"good{number}.py")
    (shared / "env" / "lib64").symlink_to("lib")
    (shared / "env" / "broken").symlink_to("nowhere")
    assert find_tree_trust_problem(shared / "env") is None
    assert find_tree_trust_problem(shared / "missing") is None
    make_file(deep / "bad.pth", 0o646)
    problem = find_tree_trust_problem(shared / "env")
    assert problem
    assert f"{deep}/bad.pth" in problem.what


def test_a_file_that_others_cannot_reach_does_not_speak_for_another(shared: Path) -> None:
    for number in range(20):
        (shared / "env" / f"closed{number}").mkdir(parents=True)
        make_file(shared / "env" / f"closed{number}" / "a.py", 0o666)
        (shared / "env" / f"closed{number}").chmod(0o700)
    assert find_tree_trust_problem(shared / "env") is None
    (shared / "env" / "open").mkdir()
    make_file(shared / "env" / "open" / "a.py", 0o666)
    assert find_tree_trust_problem(shared / "env")


@needs_root
@pytest.mark.parametrize("name", ["", "lib", "lib/module.py", "link"])
def test_no_part_of_a_tree_may_be_somebody_elses(shared: Path, name: str) -> None:
    (shared / "env" / "lib").mkdir(parents=True)
    make_file(shared / "env" / "lib" / "module.py")
    (shared / "env" / "link").symlink_to("lib")
    os.lchown(shared / "env" / name, STRANGER, STRANGER)
    problem = find_tree_trust_problem(shared / "env")
    assert problem
    assert f"belongs to {STRANGER}" in problem.what
