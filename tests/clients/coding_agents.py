"""Coding agents as their makers ship them, each with a repository of its own: how one is started,
and what the model of these tests writes for it, turn by turn. They are set to send nothing to
anyone but the server, and find nothing of this machine: HOME is theirs, and so is the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import environments

KEY_VARIABLE = "KVLINE_API_KEY"
FILE = "numbers.py"
TASK = "To do: double() returns its argument, and not twice as much."
# Long enough that what an agent shows of its change has not the first line.
CONTENT = f'"""{TASK}"""\n\n\n' + "".join(f"N{n} = {n}\n" for n in range(40)) + "\n\n"
BEFORE, AFTER = "def double(x):\n    return x\n", "def double(x):\n    return 2 * x\n"
THOUGHT = "The file says it, so it comes first."
FIRST = "I read the file."
LAST = "The function doubles its argument now."
PATCH = f"""apply_patch <<'EOF'
*** Begin Patch
*** Update File: {FILE}
@@ def double(x):
-    return x
+    return 2 * x
*** End Patch
EOF"""
CODEX = """model = "tiny"
model_provider = "kvline"
model_context_window = 65536
check_for_update_on_startup = false
[features]
plugins = false
view_image = false
[analytics]
enabled = false
[model_providers.kvline]
name = "kvline"
base_url = "URL/v1"
wire_api = "responses"
env_key = "KVLINE_API_KEY"
"""
QWEN_CODE = {
    "general": {"enableAutoUpdate": False},
    "memory": {"enableManagedAutoMemory": False},  # which asks once more behind the answer
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "tools": {"useRipgrep": False},  # its own one has no right to run without install scripts
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent works."""

    home: Path
    repository: Path

    @property
    def file(self) -> Path:
        return self.repository / FILE

    def git(self, *words: str) -> str:
        command = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com", *words]
        done = subprocess.run(
            command, cwd=self.repository, check=True, capture_output=True, text=True
        )
        return done.stdout


@dataclass(frozen=True, slots=True)
class Started:
    """A process to start, with PATH and HOME beside the variables."""

    command: list[str]
    variables: dict[str, str]


@dataclass(frozen=True, slots=True)
class Agent:
    name: str  # in tests' names, and of its outputs
    title: str  # on the page
    path: str  # that it asks
    requests: int  # for the task
    calls: tuple[str, str]  # its own tools: the one that reads, the one that writes
    arguments: Callable[[Place], tuple[dict[str, str], dict[str, str]]]  # of these calls
    start: Callable[[Place, str, str, str], Started]  # with the URL, the key and the prompt

    def turns(self, place: Place) -> tuple[str, ...]:
        """What the model writes: it thinks and reads a file, changes it and ends with a text."""
        calls = zip(self.calls, self.arguments(place), strict=True)
        reads, writes = (_call(name, given) for name, given in calls)
        return f"<think>\n{THOUGHT}\n</think>\n\n{FIRST}\n{reads}", writes, LAST


def place(folder: Path) -> Place:
    """A new repository with two files, committed."""
    made = Place(folder / "home", folder / "repository")
    made.home.mkdir(parents=True)
    made.repository.mkdir()
    made.file.write_text(CONTENT + BEFORE)
    (made.repository / "README.md").write_text("Numbers.\n")
    made.git("init", "--quiet")
    made.git("add", ".")
    made.git("commit", "--quiet", "--message", "Begin")
    return made


def run(
    agent: Agent, where: Place, url: str, key: str, seconds: float
) -> subprocess.CompletedProcess[str]:
    """Until it ends."""
    prompt = f"Do what {FILE} says is to do. forced:{agent.name}"
    started = agent.start(where, url, key, prompt)
    own = {"PATH": os.environ["PATH"], "HOME": str(where.home), "LANG": "C.UTF-8"}
    return subprocess.run(
        started.command,
        cwd=where.repository,
        env=own | started.variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def _call(name: str, arguments: dict[str, str]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _codex(where: Place, url: str, key: str, prompt: str) -> Started:
    node, packages = environments.node(environments.CODING_AGENTS)
    (where.home / "config.toml").write_text(CODEX.replace("URL", url))
    script = packages / "node_modules/@openai/codex/bin/codex.js"
    words = "exec --strict-config --json --dangerously-bypass-approvals-and-sandbox"
    return Started(
        [str(node), str(script), *words.split(), prompt],
        {"CODEX_HOME": str(where.home), KEY_VARIABLE: key},
    )


def _opencode(where: Place, url: str, key: str, prompt: str) -> Started:
    """Its program itself: the package's start script is made by an install script."""
    _, packages = environments.node(environments.CODING_AGENTS)
    found = (packages / "node_modules").glob("opencode-linux-*/bin/opencode")
    # The last one is the baseline, which needs no AVX2, where there is one.
    program = max(each for each in found if "musl" not in str(each))
    provider: dict[str, Any] = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": key},
        "models": {"tiny": {"tool_call": True, "limit": {"context": 65_536, "output": 4096}}},
    }
    config = {
        "autoupdate": False,
        "share": "disabled",
        "enabled_providers": ["kvline"],
        "provider": {"kvline": provider},
    }
    return Started(
        [str(program), "run", "--pure", "--format", "json", "--model", "kvline/tiny", prompt],
        {
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "npm_config_offline": "true",  # it would install a package for plug-ins
        },
    )


def _qwen_code(where: Place, url: str, key: str, prompt: str) -> Started:
    node, packages = environments.node(environments.CODING_AGENTS)
    settings = where.home / ".qwen" / "settings.json"
    settings.parent.mkdir()
    settings.write_text(json.dumps(QWEN_CODE))
    script = packages / "node_modules/@qwen-code/qwen-code/cli.js"
    words = "--auth-type openai --output-format stream-json --yolo --prompt"
    return Started(
        [str(node), str(script), *words.split(), prompt],
        {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": "tiny"},
    )


AGENTS = (
    Agent(
        "codex",
        "Codex",
        "/v1/responses",
        3,
        ("exec_command", "exec_command"),
        lambda place: ({"cmd": f"cat {FILE}"}, {"cmd": PATCH}),
        _codex,
    ),
    Agent(
        "opencode",
        "opencode",
        "/v1/chat/completions",
        4,  # one of them for a title
        ("read", "edit"),
        lambda place: (
            {"filePath": str(place.file)},
            {"filePath": str(place.file), "oldString": BEFORE, "newString": AFTER},
        ),
        _opencode,
    ),
    Agent(
        "qwen_code",
        "Qwen Code",
        "/v1/chat/completions",
        3,
        ("read_file", "edit"),
        lambda place: (
            {"file_path": str(place.file)},
            {"file_path": str(place.file), "old_string": BEFORE, "new_string": AFTER},
        ),
        _qwen_code,
    ),
)
