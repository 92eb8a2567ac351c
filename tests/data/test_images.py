"""From image files of every kind to tensors in [-1, 1]: exact values, crops, flips, and files that are broken."""

import io
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import ExifTags, Image, ImageOps
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.images import ImageTransform, decode, normalise, to_unit_tensor

RED, GREY_OF_RED = (255, 0, 0), 76 / 255  # PIL's luma: 0.299 of 255, rounded


def transform(resolution=8, channels=1, center_crop=True, random_flip=False, eight_bit=False, seed=0):
    return ImageTransform(resolution, channels, center_crop, random_flip, eight_bit, seed)


def resize(image, **options):
    return normalise(transform(**options).resize_compact(image))


def one_pixel(mode, value):
    return Image.new(mode, (1, 1), value)


def palette_image(transparency=None):
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


def encoded(image, **save):
    file = io.BytesIO()
    image.save(file, **{"format": "png", **save})
    return {"bytes": file.getvalue(), "path": "folder/picture.png"}


COLOURS = {
    "1": (one_pixel("1", 1), (1, 1, 1), 1),
    "L": (one_pixel("L", 51), (0.2, 0.2, 0.2), 0.2),
    "LA": (one_pixel("LA", (51, 255)), (0.2, 0.2, 0.2), 0.2),
    "LA, transparent": (one_pixel("LA", (51, 0)), (1, 1, 1), 1),
    "P": (palette_image().crop((0, 0, 1, 1)), (1, 0, 0), GREY_OF_RED),
    "P, transparent": (palette_image(transparency=0).crop((0, 0, 1, 1)), (1, 1, 1), 1),
    "P, another colour transparent": (palette_image(transparency=1).crop((0, 0, 1, 1)), (1, 0, 0), GREY_OF_RED),
    "RGB": (one_pixel("RGB", RED), (1, 0, 0), GREY_OF_RED),
    "RGBA": (one_pixel("RGBA", (*RED, 255)), (1, 0, 0), GREY_OF_RED),
    "RGBA, a fifth": (one_pixel("RGBA", (*RED, 51)), (1, 0.8, 0.8), 219 / 255),
    "CMYK": (one_pixel("CMYK", (0, 255, 255, 0)), (1, 0, 0), GREY_OF_RED),
    "I;16, 0": (one_pixel("I;16", 0), (0, 0, 0), 0),
    "I;16, middle": (one_pixel("I;16", 32768), (32768 / 65535,) * 3, 32768 / 65535),
    "I;16, largest": (one_pixel("I;16", 65535), (1, 1, 1), 1),
    "I": (one_pixel("I", 32768), (32768 / 65535,) * 3, 32768 / 65535),
    "F": (one_pixel("F", 0.3), (0.3, 0.3, 0.3), 0.3),
}


@cases("channels", [1, 3])
@cases("name", COLOURS)
def test_every_mode_has_its_colour(name, channels):
    image, colour, grey = COLOURS[name]
    pixels = to_unit_tensor(image, channels)
    assert pixels.dtype == torch.float32
    assert pixels.shape == (channels, 1, 1)
    torch.testing.assert_close(pixels.flatten(), torch.tensor([grey] if channels == 1 else colour, dtype=torch.float32))


@cases("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I;16", "I;16B", "I", "F"])
@cases("channels", [1, 3])
def test_the_result_is_in_minus_one_to_one(mode, channels):
    image = Image.effect_noise((13, 9), 90)
    noise = Image.fromarray(np.asarray(image) / np.float32(255)) if mode == "F" else image.convert(mode)
    pixels = resize(noise, channels=channels)
    assert pixels.shape == (channels, 8, 12)
    assert pixels.min() >= -1
    assert pixels.max() <= 1
    assert pixels.min() < pixels.max()


def test_eight_bit_rounds_to_256_levels():
    values = np.array([[0, 128, 129, 32768], [256, 257, 65534, 65535]] * 2, np.uint16)
    pixels = resize(Image.fromarray(values), resolution=4, eight_bit=True)
    levels = torch.tensor([[0, 0, 1, 128], [1, 1, 255, 255]] * 2)
    torch.testing.assert_close(pixels[0], levels / 255 * 2 - 1)


@cases(
    ("mode", "values", "named"),
    [
        ("F", [0.0, 255.0], ["from 0 to 255", "[0, 1]"]),
        ("F", [-0.5, 1.0], ["from -0.5 to 1", "[0, 1]"]),
        ("F", [0.0, float("nan")], ["nan", "[0, 1]"]),
        ("I", [0, 65536], ["from 0 to 65536", "[0, 65535]"]),
        ("I", [-1, 65535], ["from -1 to 65535", "[0, 65535]"]),
    ],
)
def test_values_of_unknown_scale_are_an_error(mode, values, named):
    image = Image.new(mode, (2, 1))
    for column, value in enumerate(values):
        image.putpixel((column, 0), value)
    with pytest.raises(LabError) as caught:
        to_unit_tensor(image, 1)
    assert all(part in str(caught.value) for part in [repr(mode), *named, "Rescale it"])


# --- resize, crop, flip ----------------------------------------------------------------------------------------------


@cases(
    ("size", "resized"), [((8, 8), (8, 8)), ((4, 4), (8, 8)), ((16, 32), (16, 8)), ((100, 9), (8, 89)), ((1, 5), (40, 8))]
)
def test_the_shorter_side_becomes_the_resolution(size, resized):
    width, height = size
    assert resize(Image.new("L", (width, height))).shape == (1, *resized)


def test_resizing_is_antialiased():
    # A quarter of the columns is white. Taken every fourth column, an image would be all white or all black.
    stripes = np.zeros((32, 32), np.uint8)
    stripes[:, ::4] = 255
    inner = resize(Image.fromarray(stripes))[0, :, 1:-1]
    torch.testing.assert_close(inner, torch.full((8, 6), -0.5))


def rising(height, width):
    """An image that tells every pixel apart, as a tensor that is resized already."""
    return torch.arange(height * width, dtype=torch.float32).reshape(1, height, width)


@cases(("height", "width", "top", "left"), [(8, 8, 0, 0), (8, 13, 0, 2), (13, 8, 2, 0), (8, 9, 0, 0), (10, 8, 1, 0)])
def test_centre_crop_takes_the_middle(height, width, top, left):
    image = rising(height, width)
    expected = image[:, top : top + 8, left : left + 8]
    assert torch.equal(transform().augment(image, 3), expected)
    assert torch.equal(transform(center_crop=False, random_flip=True).fixed(image), expected)


@given(height=st.integers(8, 30), width=st.integers(8, 30), number=st.integers(0, 10**9))
def test_random_crops_are_squares_out_of_the_image_and_belong_to_the_image_number(height, width, number):
    image = rising(height, width)
    crop = transform(center_crop=False).augment(image, number)
    first = int(crop[0, 0, 0])
    top, left = divmod(first, width)
    assert torch.equal(crop, image[:, top : top + 8, left : left + 8])
    assert crop.shape == (1, 8, 8)
    assert torch.equal(crop, transform(center_crop=False).augment(image, number))


def test_random_crops_reach_every_place():
    crops = [transform(center_crop=False).augment(rising(8, 12), number) for number in range(200)]
    assert {int(crop[0, 0, 0]) for crop in crops} == {0, 1, 2, 3, 4}


def test_half_of_the_images_are_flipped_the_same_ones_each_time():
    image = rising(8, 8)
    flips = []
    for number in range(1000):
        pixels = transform(random_flip=True).augment(image, number)
        flips.append(torch.equal(pixels, image.flip(-1)))
        assert flips[-1] or torch.equal(pixels, image)
        assert torch.equal(pixels, transform(random_flip=True).augment(image, number))
    assert 450 < sum(flips) < 550


def test_another_seed_flips_and_crops_others():
    def views(seed):
        made = transform(center_crop=False, random_flip=True, seed=seed)
        return torch.stack([made.augment(rising(8, 12), number) for number in range(50)])

    assert torch.equal(views(0), views(0))
    assert not torch.equal(views(0), views(1))


def test_levels_become_the_numbers_that_division_makes_of_them():
    """The same bits as numpy's, which records of earlier versions hold."""
    levels = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(levels.astype(np.float32) / 255) * 2 - 1
    assert torch.equal(normalise(torch.from_numpy(levels)), expected)
    assert torch.equal(resize(Image.fromarray(levels.reshape(16, 16)), resolution=16).flatten(), expected)
    compact = transform(resolution=16).resize_compact(Image.fromarray(levels.reshape(16, 16)))
    assert compact.dtype == torch.uint8
    assert torch.equal(normalise(expected), expected)


@cases("crop", ["centre", "random"])
@cases("size", [(8, 8), (8, 13), (11, 8)])
def test_images_of_a_batch_are_augmented_as_each_alone(size, crop):
    made = transform(center_crop=crop == "centre", random_flip=True, seed=3)
    images, numbers = torch.rand(40, 1, *size), range(5, 45)
    alone = torch.stack([made.augment(*each) for each in zip(images, numbers, strict=True)])
    assert torch.equal(made.augment_all(images, numbers), alone)
    assert not torch.equal(alone, made.fixed(images))


# --- files -----------------------------------------------------------------------------------------------------------


def exif(*tags):
    """EXIF data with tags of any type: number, type, count, content."""
    offset, entries, contents = 14 + 12 * len(tags), b"", b""
    for number, kind, count, content in sorted(tags):
        inline = content.ljust(4, b"\0") if len(content) <= 4 else struct.pack("<I", offset + len(contents))
        entries += struct.pack("<HHI", number, kind, count) + inline
        contents += content if len(content) > 4 else b""
    return b"Exif\0\0" + struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4) + contents


TYPES = {1: b"H", 2: b"72\0", 3: b"H\0", 4: b"H\0\0\0", 5: b"H" + bytes(7), 7: b"ab", 9: b"\xff" * 4, 12: b"\x7f" * 8}
TAGS = sorted({int(tag) for tag in ExifTags.Base} - {0x0112})
XMP = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.filterwarnings("ignore")  # PIL warns of tags that it does not understand
@cases("kind", TYPES)
def test_tags_of_other_types_do_not_keep_a_picture_from_being_turned(kind):
    plain = encoded(Image.effect_noise((6, 4), 60), format="jpeg")["bytes"]
    expected = np.rot90(np.asarray(Image.open(io.BytesIO(plain))), -1)
    turned = (0x0112, 3, 1, b"\6\0")
    segments = [exif(turned, (tag, kind, count, TYPES[kind] * count)) for tag in (*TAGS, 0x8825) for count in (1, 2, 3)]
    truncated = exif((0x010F, 2, 2**31, b"camera"), turned)  # PIL stops at the first tag
    for data in [exif(turned), XMP, truncated, *segments]:
        segment = b"\xff\xe1" + struct.pack(">H", len(data) + 2) + data
        image = decode({"bytes": plain[:2] + segment + plain[2:], "path": None})
        assert np.array_equal(np.asarray(image), expected)


@cases("orientation", [*range(10), 255])
@cases("kind", ["jpeg", "png", "tiff", "webp"])
def test_an_orientation_does_what_it_does_in_pil(orientation, kind):
    tags = Image.Exif()
    tags[0x0112] = orientation
    cell = encoded(Image.effect_noise((6, 4), 60), format=kind, exif=tags)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(cell["bytes"])))
    assert np.array_equal(np.asarray(decode(cell)), np.asarray(expected))


@cases("error", [OverflowError("too large"), KeyError("key"), RecursionError("deep"), ZeroDivisionError(), EOFError("end")])
def test_an_error_of_a_decoder_is_one_of_its_file(monkeypatch, error):
    def fail(image):
        raise error

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", fail)
    with pytest.raises(LabError, match=r"The image 'folder/picture\.png' cannot be read: .*--skip_corrupt_images"):
        transform().read(encoded(Image.new("L", (2, 2))))


def test_a_lack_of_memory_is_no_error_of_a_file(monkeypatch):
    monkeypatch.setattr("PIL.Image.open", lambda file: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        transform().read(encoded(Image.new("L", (2, 2))))


def test_images_are_read_from_paths_and_from_bytes(tmp_path):
    image = Image.effect_noise((8, 8), 60)
    image.save(tmp_path / "a.png")
    from_path = transform().read({"bytes": None, "path": str(tmp_path / "a.png")})
    assert torch.equal(from_path, transform().read(encoded(image)))
    assert torch.equal(from_path, resize(image))


PNG = encoded(Image.effect_noise((16, 16), 60))["bytes"]
BROKEN = {
    "truncated": {"bytes": PNG[: len(PNG) // 2], "path": "a/half.png"},
    "corrupt": {"bytes": PNG[:60] + b"\0" * (len(PNG) - 60), "path": "a/zeros.png"},
    "empty file": {"bytes": b"", "path": "a/empty.png"},
    "text": {"bytes": b"not an image at all", "path": "a/text.png"},
    "missing file": {"bytes": None, "path": "/nowhere/missing.png"},
    "unknown scale": {**encoded(Image.new("F", (2, 2), 7.0), format="tiff"), "path": "a/float.tiff"},
    "bytes alone": {"bytes": PNG[:99], "path": None},
    "no bytes and no path": {"bytes": None, "path": None},
    "empty cell": None,
}


@cases("name", BROKEN)
def test_an_image_that_cannot_be_read_is_named_with_the_remedy(name):
    cell = BROKEN[name]
    with pytest.raises(LabError) as caught:
        transform().read(cell)
    message = str(caught.value)
    assert repr((cell and cell["path"]) or "(embedded bytes)") in message
    assert "--skip_corrupt_images" in message


@pytest.mark.filterwarnings("ignore")  # PIL warns of broken metadata in its own words
@pytest.mark.parametrize("kind", ["png", "jpeg", "tiff"])
@settings(deadline=None)
@given(cut=st.floats(0, 1), damage=st.dictionaries(st.integers(0, 300), st.integers(0, 255), max_size=4))
def test_no_damage_to_a_file_gets_past_the_error_for_users(kind, cut, damage):
    cell = encoded(Image.effect_noise((16, 12), 60).convert("RGB"), format=kind)
    damaged = bytearray(cell["bytes"][: int(cut * len(cell["bytes"]))])
    for place, value in damage.items():
        damaged[place : place + 1] = bytes([value])
    try:
        pixels = transform(channels=3).read({**cell, "bytes": bytes(damaged)})
    except LabError:
        return
    assert pixels.abs().max() <= 1


@given(arrays(np.uint16, (8, 8)))
def test_16_bit_values_are_kept_in_order(values):
    pixels = resize(Image.fromarray(values))[0]
    assert torch.equal(torch.from_numpy(values.astype(np.int64)), ((pixels.double() + 1) / 2 * 65535).round().long())
