"""Files of videos as some of their frames: which ones, from which formats, and what is refused."""

import base64
import io
import sys

import numpy as np
import pytest
from PIL import Image
from tests.oracles.film_files import FORMATS, bad_films, film_file, grey_frames, shades, spoilt_film

from quire.config import limits
from quire.config.multimodal import VideoReading
from quire.errors import ConfigError, RequestError
from quire.extras import install_command
from quire.multimodal.image_files import PixelBudget
from quire.multimodal.video_files import PICTURES, decode_video, read_pictures, reading_of
from quire.multimodal.web_fetch import MediaError

ALL = VideoReading(-1)


def decode(data, reading=ALL, budget=None):
    return decode_video(data, budget or PixelBudget(), reading)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_frames_that_are_wanted_are_read_wherever_key_frames_are(kind):
    frames = grey_frames(61)
    for group in (5, 100):
        data = film_file(frames, kind, rate=10, group=group)
        whole = decode(data)
        assert whole.frames.shape == frames.shape and whole.rate == 10 and whole.total == 61 and whole.is_whole
        assert shades(whole.frames) == pytest.approx(shades(frames), abs=6)
        assert whole.times.tolist() == [number / 10 for number in range(61)]
        for count in (1, 2, 7, 40, 61):
            some = decode(data, VideoReading(count))
            assert some.places.tolist() == np.linspace(0, 60, count, dtype=int).tolist()
            assert (some.frames == whole.frames[some.places]).all(), (group, count)


def test_a_rate_and_a_number_bound_the_frames():
    data = film_file(grey_frames(60), rate=20)
    counts = {(32, -1.0): 32, (-1, 2.0): 6, (4, 2.0): 4, (100, -1.0): 60, (-1, 0.1): 1, (-1, 500.0): 60}
    assert {key: len(decode(data, VideoReading(*key)).frames) for key in counts} == counts
    assert len(decode(film_file(grey_frames(1))).frames) == 1
    assert not decode(data, VideoReading(59)).is_whole


def test_a_file_is_turned_as_it_says():
    frames = grey_frames(3)
    upright = decode(film_file(frames))
    turned = decode(film_file(frames, rotation=90))
    assert turned.frames.shape[1:3] == (64, 48)
    assert (np.rot90(upright.frames, axes=(1, 2)) == turned.frames).all()


def test_of_a_file_that_breaks_off_what_is_there_is_read():
    frames = grey_frames(60)
    for kind in ("webm", "mkv", "ts"):
        data = film_file(frames, kind)
        video = decode(data[: len(data) // 2], VideoReading(8))
        assert 2 <= len(video.frames) <= 8 and 8 < video.total < 60, kind
        assert shades(video.frames) == pytest.approx(shades(frames[video.places]), abs=25)


@pytest.mark.parametrize(("name", "data"), bad_films(), ids=[name for name, _ in bad_films()])
def test_what_is_no_video_is_refused(name, data, monkeypatch):
    with pytest.raises(MediaError) as caught:
        decode(data)
    assert "root:" not in str(caught.value) and " at 0x" not in str(caught.value)


def test_frames_packets_pixels_and_time_are_bounded(monkeypatch):
    data = film_file(grey_frames(20))
    with pytest.raises(MediaError, match="have more than 30000 pixels together"):
        decode(data, budget=PixelBudget(30_000))
    assert len(decode(data, VideoReading(9), PixelBudget(30_000)).frames) == 9
    for name, bound, why in (
        ("MAX_VIDEO_FRAMES", 19, "20 of its frames are wanted"),
        ("MAX_VIDEO_PACKETS", 19, "more than 19 frames"),
        ("MAX_VIDEO_SECONDS", -1.0, "takes longer than"),
        ("MAX_IMAGE_PIXELS", 3000, "none of its frames can be decoded"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(limits, name, bound)
            with pytest.raises(MediaError, match=why):
                decode(data)


def test_pictures_stand_for_a_video():
    frames = grey_frames(3)

    def jpeg(frame):
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "jpeg")
        return base64.b64encode(file.getvalue()).decode()

    url = PICTURES + ",".join(map(jpeg, frames))
    video = read_pictures(url, PixelBudget())
    assert video.rate is None and shades(video.frames) == pytest.approx(shades(frames), abs=2)
    for bad, why in (
        (url + ",@@", "base64"),
        (url + "," + jpeg(frames[0, :9])[1:], ""),
        (PICTURES, "cannot be decoded"),
    ):
        with pytest.raises(MediaError, match=why):
            read_pictures(bad, PixelBudget())
    with pytest.raises(MediaError, match="several sizes"):
        read_pictures(f"{url},{jpeg(frames[0, :9])}", PixelBudget())


def test_options_that_cannot_be_are_named():
    assert reading_of(VideoReading(5), {"video": {"fps": 2}}) == VideoReading(5, 2.0)
    assert reading_of(VideoReading(5), None) == VideoReading(5)
    for given, why in (
        ({"video": {"num_frames": 0}}, r"video\.num_frames=0 must be -1 \(all\) or 1 to 2048"),
        ({"video": {"num_frames": True}}, r"video\.num_frames=True"),
        ({"video": {"fps": float("nan")}}, r"video\.fps=nan"),
        ({"video": {"fast": 1}}, "not {'video': {'fast': 1}}"),
        ({"film": {}}, "not {'film'"),
        (3, "not 3"),
    ):
        with pytest.raises(RequestError, match=rf"media_io_kwargs: .*{why}"):
            reading_of(VideoReading(), given)


def test_the_extra_is_named_where_the_library_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(RequestError) as caught:
        decode(b"")
    assert install_command("video") in str(caught.value)
    assert issubclass(ConfigError, Exception)


@pytest.mark.parametrize("rounds", [60, pytest.param(5000, marks=pytest.mark.exhaustive)])
def test_spoilt_files_are_read_or_refused(rounds):
    files = [film_file(grey_frames(12, 32, 32), kind) for kind in FORMATS]
    read = 0
    for seed in range(rounds):
        try:
            video = decode(spoilt_film(files, seed), VideoReading(4))
        except MediaError:
            continue
        assert 1 <= len(video.frames) <= 4, seed
        read += 1
    assert 0 < read < rounds
