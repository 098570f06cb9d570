"""Audio of prompts: it is decoded here, within bounds, and SGLang is given plain samples. No SGLang here.

SGLang decodes all of a file, however much that is. A few kilobytes of silence decode to gigabytes, and samples at 44,101 Hz
need gigabytes to be resampled. The head of a file says how much it has, but most decoders go on after that; soundfile, which
decodes here, does not. So the size of a clip is known before it is decoded, and no other decoder reads what a client sent.
"""

import importlib
import io
import struct
from collections.abc import Sequence
from typing import Any

from enginepool.workers.engine import EngineError

#: Samples of the clips of a prompt, of all channels: as many as 32 MiB have that are not compressed.
MAX_SAMPLES = 1 << 25
#: Samples that are larger overflow in the processors of models.
MAX_SAMPLE = 1 << 16
#: Others have no small common divisor with those of models, by which the cost of resampling is divided.
RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 88200, 96000, 176400, 192000)
FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
#: what reads them
LIBRARY = "soundfile"


def count_samples(clips: Sequence[bytes], longest_s: float) -> int:
    """Samples of all channels of the clips of a prompt, by what their heads say. Nothing is decoded.

    Raises:
        EngineError: one is no audio, or longer than this many seconds; or they are too many samples together.
    """
    total = 0
    for i, data in enumerate(clips):
        with _opened(i, data) as file:
            total += file.frames * file.channels
            if total > MAX_SAMPLES:
                raise EngineError(f"audio {i}: {total} samples with those before it, of all channels; at most {MAX_SAMPLES}")
            if file.frames > longest_s * file.samplerate:
                seconds = file.frames / file.samplerate
                raise EngineError(f"audio {i}: {seconds:.2f} s; this model takes {longest_s:g} s of a clip")
    return total


def decode(i: int, data: bytes) -> bytes:
    """The clip as a WAV file of 32-bit floats. Raises EngineError. `count_samples` knows how much it is."""
    with _opened(i, data) as file:
        try:
            samples = file.read(dtype="float32", always_2d=True)
        except Exception as error:  # decoders raise what they like
            raise EngineError(f"audio {i}: it cannot be decoded") from error
        # A comparison with NaN is false.
        if not -MAX_SAMPLE <= samples.min(initial=0.0) <= samples.max(initial=0.0) <= MAX_SAMPLE:
            raise EngineError(f"audio {i}: it has samples that are NaN, or larger than {MAX_SAMPLE}")
        return wav(samples, file.samplerate)


def wav(samples: Any, rate: int) -> bytes:
    """A WAV file of these samples: an array of float32, a column for each channel."""
    channels, size = samples.shape[1], samples.nbytes
    about = struct.pack("<HHIIHH", 3, channels, rate, 4 * channels * rate, 4 * channels, 32)
    head = struct.pack("<4sI8sI", b"RIFF", 36 + size, b"WAVEfmt ", len(about))
    return b"".join((head, about, struct.pack("<4sI", b"data", size), samples.data))


def _opened(i: int, data: bytes) -> Any:
    library: Any = importlib.import_module(LIBRARY)
    try:
        file = library.SoundFile(io.BytesIO(data))
    except Exception as error:
        raise EngineError(f"audio {i}: it cannot be read as WAV, FLAC, OGG or MP3") from error
    if file.format not in FORMATS:
        raise EngineError(f"audio {i}: {file.format}; WAV, FLAC, OGG or MP3")
    if file.samplerate not in RATES:
        raise EngineError(f"audio {i}: {file.samplerate} Hz; one of {', '.join(map(str, RATES))}")
    return file
