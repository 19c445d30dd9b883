"""Where a number comes from: the commit of the code's own checkout, and no other's."""

import shutil
import subprocess
import sys

from moe_rl import provenance


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit_told(folder):
    code = "import provenance; print(provenance.git_commit())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    return done.stdout.strip()


def test_the_commit_is_that_of_the_checkout_and_none_for_an_untracked_copy_in_another_repository(tmp_path):
    shutil.copy(provenance.__file__, tmp_path)
    assert commit_told(tmp_path) == ""
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "of something else")
    assert commit_told(tmp_path) == ""
    git(tmp_path, "add", "provenance.py")
    git(tmp_path, "commit", "-m", "with it")
    assert commit_told(tmp_path) == git(tmp_path, "rev-parse", "--short=12", "HEAD")
    (tmp_path / "provenance.py").write_text((tmp_path / "provenance.py").read_text() + "\n")
    assert commit_told(tmp_path).endswith("-dirty")
