"""The output side of one sequence: from sampled tokens to text, log-probabilities and a reason to end."""

from __future__ import annotations

from llmc.runtime.batch import StepOutput
from llmc.runtime.detokenizer import IncrementalDetokenizer, StopMatcher, TextCodec
from llmc.runtime.logprobs import top_logprobs
from llmc.runtime.request import FinishReason, TokenLogprob
from llmc.runtime.sequence import Sequence


class Track:
    """What has become of a sequence's tokens so far. Used by the engine's thread only."""

    def __init__(self, sequence: Sequence, codec: TextCodec | None) -> None:
        params = sequence.request.params
        self.sequence = sequence
        self.last_token_time = 0.0
        self._matcher = StopMatcher(params.stop)
        self._detokenizer = None
        if codec is not None:
            prompt = sequence.request.prompt
            self._detokenizer = IncrementalDetokenizer(codec, prompt, params.skip_special_tokens)

    def ending(self, token: int, number: int) -> FinishReason | None:
        """Why the sequence ends with the `number`-th token of its output, as far as that depends on no text."""
        armed = number >= self.sequence.request.params.min_tokens
        if armed and token in self.sequence.stop_ids:
            return "stop"
        return "length" if number >= self.sequence.max_tokens else None

    def advance(self, token: int, number: int) -> tuple[str, FinishReason | None, bool]:
        """Takes the `number`-th token of the sequence's output, each in its turn.

        Returns the text that can go out, why the sequence ends with this token (None: it goes on), and
        whether the token is part of the output: one that ends it is not.
        """
        armed = number >= self.sequence.request.params.min_tokens
        if armed and token in self.sequence.stop_ids:
            return self._rest(armed), "stop", False
        text, hit = "", False
        if self._detokenizer is not None:
            text, hit = self._matcher.push(self._detokenizer.push(token), armed)
        if hit:
            return text, "stop", True
        if number >= self.sequence.max_tokens:
            return text + self._rest(armed), "length", True
        return text, None, True

    def logprob(self, token: int, output: StepOutput, row: int) -> TokenLogprob | None:
        """The log-probabilities that the request asked for, of the token sampled in `row`."""
        wanted = self.sequence.request.params.logprobs
        if wanted is None:
            return None
        top = top_logprobs(output.logits[row], wanted) if wanted and output.logits is not None else ()
        own = float(output.logprobs[row])
        # The machine code's figure, whatever else was asked for; those of the list differ from it in the last bits.
        return TokenLogprob(token, own, tuple((other, own if other == token else value) for other, value in top))

    def _rest(self, armed: bool) -> str:
        """Text held back so far, when no token will follow."""
        if self._detokenizer is None:
            return ""
        text, hit = self._matcher.push(self._detokenizer.flush(), armed)
        return text if hit else text + self._matcher.flush()
