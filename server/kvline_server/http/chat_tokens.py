"""A conversation to tokens: rendered by the model's chat template, and with what clients wrote in
it as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvline_contract.launch import ToolCallParser
from kvline_server.formats.detect import NoFormat
from kvline_server.http.answering import answering
from kvline_server.http.controls import Controls, Unfollowed
from kvline_server.http.errors import BadRequest
from kvline_server.http.renderers import CPU_SECONDS, Renderers, as_job
from kvline_server.http.template_files import ChatFiles
from kvline_server.http.tokens import Tokens

MAX_RENDERED = 8 << 20  # characters
# Bytes that one rendering may take, which copies texts several times at up to 4 bytes a character;
# and, of a conversation as JSON, for each byte of text that is tokenised: templates leave some out.
RENDERING, RENDERING_PER_BYTE, JSON_PER_BYTE = 8 << 20, 32, 4


Rendered = tuple[str, bytes]  # with its characters' origins (traced.py)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a template gets beside the messages."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[dict[str, Any]] | None = None
    tools: Sequence[dict[str, Any]] = ()


class ChatTokens:
    def __init__(
        self,
        tokens: Tokens,
        files: ChatFiles,
        processes: int = 1,
        seconds: float = CPU_SECONDS,
        parser: ToolCallParser | None = None,
    ) -> None:
        """`processes`: that render, so many at once; `seconds`: of CPU time for each rendering;
        `parser`: of tool calls, instead of the one that the template shows."""
        self._tokens, self._files, self._parser = tokens, files, parser
        template = files.tool_template or files.template or ""
        self.answering = answering(template, tokens.added, parser)
        self.processes = processes
        self._renderers: Renderers | None = None
        if files.template is not None:
            self._controls = Controls(tokens.tokenizer)
            memory = RENDERING + RENDERING_PER_BYTE * tokens.max_text
            limits = memory, seconds
            texts = files.template, files.tool_template
            self._renderers = Renderers(files.name, texts, processes, *limits)

    def problem(self) -> str:
        """Why there is no chat, though there is a template; or nothing."""
        if self._renderers is None:
            return self._files.problem
        invalid = self._renderers.known().invalid
        return invalid and f"{self._renderers.title} {invalid}"

    def tool_problem(self) -> str:
        """Why tools are refused, though a template takes some or a parser is named; or nothing."""
        no_tools = self._renderers.known().no_tools if self._renderers is not None else ""
        if self.answering.format is NoFormat.UNKNOWN and not no_tools:
            return f"tools are refused: {NoFormat.UNKNOWN}"
        if self._parser is not None and no_tools:
            assert self._renderers is not None
            return (
                f"tools are refused: {self._renderers.title} {no_tools}; "
                "spec.engine.toolCallParser changes nothing"
            )
        return ""

    def render(self, messages: list[dict[str, Any]], asked: Asked) -> Rendered:
        """Takes as long as the template does. Raises BadRequest where that has an error."""
        if self._renderers is None:
            problem = self._files.problem or "this model has no chat template"
            raise BadRequest(f"{problem}; use /v1/completions", "messages")
        known = self._renderers.known()
        if known.invalid:
            message = f"{self._renderers.title} {known.invalid}; use /v1/completions"
            raise BadRequest(message, "messages")
        if asked.documents and not known.documents:
            message = f"documents: {self._renderers.title} does not read them"
            raise BadRequest(message, "documents", "unsupported_value")
        if asked.tools and known.no_tools:
            message = f"tools: {self._renderers.title} {known.no_tools}"
            raise BadRequest(message, "tools", "unsupported_value")
        own: dict[str, Any] = dict(self._files.variables)
        own["add_generation_prompt"] = asked.add_generation_prompt
        variables = {**asked.variables, "documents": asked.documents, "tools": asked.tools or None}
        job = as_job(messages, own, variables, asked.continue_final_message)
        if len(job) > JSON_PER_BYTE * self._tokens.max_text:
            raise self._tokens.too_long(len(job), "messages")
        return self._renderers.render(job)

    def tokenise(self, rendered: Rendered, most: int) -> list[int]:
        """Raises BadRequest where the text is far beyond `most` tokens, or not to be followed."""
        assert self._renderers is not None
        text, origins = rendered
        if len(text) > MAX_RENDERED:
            raise BadRequest(
                "the rendered messages are too long", "messages", "context_length_exceeded"
            )
        self._tokens.check_length(text, most, "messages")
        try:
            return self._controls.encode(text, origins)
        except Unfollowed as error:
            message = f"{self._renderers.title} writes {str(error)!r} in a way that does not show"
            raise BadRequest(f"{message} whether a client wrote it", "messages") from None
