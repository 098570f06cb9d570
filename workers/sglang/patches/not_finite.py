"""Changes to SGLang's sampling so that logits that are not finite end their sequence, and no other one.

No SGLang here: its classes are arguments.

SGLang samples from NaN: the token is any one, such as 0, or torch raises and the scheduler ends with all its sequences. A token
id below 0 is what SGLang itself takes for NaN: it ends the sequence with "NaN happened". Speculative decoding reads the sampled
tokens on the device, and is left as it is.
"""

from typing import Any

#: Logits from here on, which no working model has, are infinite once they are divided by a temperature of 1e-6.
_HUGE = 1e30
_NOT_FINITE = -1


def _not_finite(logits: Any) -> Any:
    """The rows of `logits` [n, vocab] with NaN, with infinity, or without a finite value, as bool [n]; -inf is a mask."""
    return ~(logits.amax(dim=-1).abs() < _HUGE)


def mark_logits_that_are_not_finite(runner: Any, sampler: Any, relay: Any) -> None:
    """Have the token of each row of logits that is not finite be -1; such a row is sampled as if its logits were zeros.

    Nothing here waits for the device.

    Args:
        runner: SGLang's class that runs a model, and samples.
        sampler: SGLang's class of samplers. It applies logit processors, after all other changes of the logits.
        relay: SGLang's class that keeps sampled tokens on the device for the next forward, which is launched before SGLang
            has seen them. An embedding of token -1 would be an error of the device.
    """
    sample, preprocess, stash = runner.sample, sampler._preprocess_logits, relay.stash
    #: None outside of sampling: log-probabilities of labels are computed from the logits as they are
    sampler.not_finite_rows = None

    def sample_finite(self: Any, logits_output: Any, forward_batch: Any) -> Any:
        if not self.spec_algorithm.is_none():
            return sample(self, logits_output, forward_batch)
        # Before masks, which hide NaN.
        self.sampler.not_finite_rows = _not_finite(logits_output.next_token_logits)
        tokens = sample(self, logits_output, forward_batch)
        rows, self.sampler.not_finite_rows = self.sampler.not_finite_rows, None
        return tokens.masked_fill(rows, _NOT_FINITE)

    def _preprocess_logits(self: Any, logits: Any, sampling_info: Any) -> Any:
        logits = preprocess(self, logits, sampling_info)
        if self.not_finite_rows is not None:
            # Again: a bias or a mask may leave nothing finite.
            self.not_finite_rows = self.not_finite_rows | _not_finite(logits)
            logits.masked_fill_(self.not_finite_rows.unsqueeze(1), 0.0)
        return logits

    def stash_finite(self: Any, future_indices: Any, payload: Any) -> None:
        if self.spec_algo.is_none():
            payload.bonus_tokens = payload.bonus_tokens.clamp(min=0)
        stash(self, future_indices, payload)

    runner.sample, sampler._preprocess_logits, relay.stash = sample_finite, _preprocess_logits, stash_finite


def accept_no_marked_token(request: Any) -> None:
    """Have a sequence that ended with NaN leave its grammar: llguidance raises for token -1. `request` is SGLang's class."""
    check = request._check_vocab_boundary_finish

    def _check_vocab_boundary_finish(self: Any, new_accepted_tokens: Any = None) -> bool:
        if found := check(self, new_accepted_tokens):
            self.grammar = None
        return found

    request._check_vocab_boundary_finish = _check_vocab_boundary_finish
