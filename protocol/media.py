"""Images, videos and audio of a request to generate: what their frames are held to, and which belong to a prompt. Nothing here
opens what a medium names, or decodes it."""

from collections.abc import Sequence

import msgspec

from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer, check_frames
from enginepool.protocol.messages import MAX_MEDIUM_BYTES, MAX_MEDIUM_NAME, FrameSpec, Medium
from enginepool.protocol.ragged import bad

FRAMES = ("media", "media_lengths")
#: Tokens that a medium is expected to take in the engine: so many, or one for each so many bytes if that is more. How many it
#: takes, only the model's processor knows.
LEAST_TOKENS, BYTES_PER_TOKEN = 1024, 1024
#: source -> the feature that a worker needs for it, besides the one that is called as the kind
SOURCE_FEATURES = {"url": "media_url", "path": "media_path"}
#: the feature of a worker that keeps the token ids of prompts with images, so that it continues a sequence after its tokens
IMAGE_IDS = "image_ids"


def expected_tokens(nbytes: int) -> int:
    """What a medium of so many bytes is expected to take in the engine."""
    return max(LEAST_TOKENS, nbytes // BYTES_PER_TOKEN)


class MediaSpan(msgspec.Struct, frozen=True, gc=False):
    """The media of one prompt: from `first` to `end` in the list, from `begin` to `stop` in the bytes. `tokens`: what they are
    expected to take."""

    first: int
    end: int
    begin: int
    stop: int
    tokens: int


class RequestMedia(msgspec.Struct, frozen=True, gc=False):
    """The checked media of a request. `spans`: by the number of a prompt that has some; `needs`: by the feature that a worker
    needs, the first medium that needs it."""

    media: Sequence[Medium] = ()
    frames: Sequence[Buffer] = ()
    spans: dict[int, MediaSpan] = {}
    needs: dict[str, int] = {}

    def expected_tokens(self, prompt: int) -> int:
        """What the media of a prompt are expected to take in the engine."""
        return self.spans[prompt].tokens if prompt in self.spans else 0

    def bytes_of(self, prompt: int) -> int:
        """Bytes of the media of a prompt, as a worker is sent them."""
        span = self.spans.get(prompt)
        return 0 if span is None else span.stop - span.begin

    def of_prompt(self, prompt: int) -> tuple[list[Medium], list[FrameSpec], list[Buffer]]:
        """The media of a prompt, with their frames: slices of the same bytes. Nothing for a prompt without media."""
        span = self.spans.get(prompt)
        if span is None:
            return [], [], []
        media = [Medium(0, one.kind, one.source) for one in self.media[span.first : span.end]]
        data = memoryview(self.frames[0])[span.begin : span.stop]
        lengths = memoryview(self.frames[1])[4 * span.first : 4 * span.end]
        return media, media_specs(len(data), len(media)), [data, lengths]


def media_specs(total: int, count: int) -> list[FrameSpec]:
    """The frames of so many media, of so many bytes together."""
    return [FrameSpec(FRAMES[0], "uint8", (total,)), FrameSpec(FRAMES[1], "uint32", (count,))]


def read_media(media: Sequence[Medium], specs: Sequence[FrameSpec], frames: Sequence[Buffer], prompts: int) -> RequestMedia:
    """The media of a request with so many prompts. `specs`, `frames`: the two of them.

    Raises:
        WireError: `malformed` for frames that do not fit, `bad_request` for a medium that is not in order.
    """
    check_frames(specs, frames)
    wanted = media_specs(len(frames[0]) if frames else 0, len(media))
    if list(specs) != wanted:
        text = f"frames: {msgspec.to_builtins(specs)} of {len(media)} media; expected {msgspec.to_builtins(wanted)}"
        raise WireError("malformed", text, field="frames")
    lengths = memoryview(frames[1]).cast("B").cast("I").tolist()
    if sum(lengths) != len(frames[0]):
        text = f"media_lengths: sum {sum(lengths)}; frame 'media' has {len(frames[0])}"
        raise WireError("malformed", text, field="media_lengths")
    spans, needs = dict[int, MediaSpan](), dict[str, int]()
    data, begin, before = memoryview(frames[0]), 0, 0
    for at, (one, length) in enumerate(zip(media, lengths, strict=True)):
        if not before <= one.prompt < prompts:
            order = f"from {before} on, as media are in the order of their prompts"
            text = f"media[{at}]: prompt {one.prompt}; {order}, and below {prompts}"
            raise bad(f"media[{at}]", text, str(prompts - 1))
        check_medium(f"media[{at}]", one, data[begin : begin + length])
        for feature in (one.kind, SOURCE_FEATURES.get(one.source)):
            if feature is not None:
                needs.setdefault(feature, at)
        span = spans.get(one.prompt) or MediaSpan(at, at, begin, begin, 0)
        tokens = span.tokens + expected_tokens(length)
        spans[one.prompt] = MediaSpan(span.first, at + 1, span.begin, begin + length, tokens)
        begin, before = begin + length, one.prompt
    return RequestMedia(tuple(media), tuple(frames), spans, needs)


def check_medium(where: str, medium: Medium, data: Buffer) -> None:
    """Hold the bytes of a medium, or its name, to their bounds.

    Raises:
        WireError: `bad_request` with the field `where`.
    """
    most, what = (MAX_MEDIUM_BYTES, "bytes") if medium.source == "bytes" else (MAX_MEDIUM_NAME, f"bytes of {medium.source}")
    if not 1 <= len(data) <= most:
        raise bad(where, f"{where}: {len(data)} {what}; 1 to {most}", str(most))
    if medium.source != "bytes":
        try:
            name = str(data, "utf-8")
        except UnicodeDecodeError:
            raise bad(where, f"{where}: its {medium.source} is not UTF-8", "") from None
        if not name.isprintable():
            raise bad(where, f"{where}: its {medium.source} has characters that cannot be printed", "")
