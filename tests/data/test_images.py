"""From image files of every kind to tensors in [-1, 1]: exact values, crops, flips, and files that are broken."""

import io
import struct
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.extra.numpy import arrays
from PIL import ExifTags, Image, ImageOps
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.images import ImageTransform, decode, normalise

RED, GREY_OF_RED = (255, 0, 0), 76 / 255  # PIL's luma: 0.299 of 255, rounded


def transform(resolution=8, channels=1, center_crop=True, random_flip=False, eight_bit=False, seed=0):
    return ImageTransform(resolution, channels, center_crop, random_flip, eight_bit, seed)


def resize(image, **options):
    return normalise(transform(**options).resize(image))


def levels(image):
    """The levels in [0, 1] of an image of one pixel in three and in one channel."""
    return [((resize(image, resolution=1, channels=channels) + 1) / 2).flatten() for channels in (3, 1)]


def one_pixel(mode, value):
    return Image.new(mode, (1, 1), value)


def palette_image(transparency=None):
    image = Image.new("P", (1, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
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
    "LA, transparent": (one_pixel("LA", (51, 0)), (1, 1, 1), 1),
    "P": (palette_image(), (1, 0, 0), GREY_OF_RED),
    "P, transparent": (palette_image(0), (1, 1, 1), 1),
    "P, another colour transparent": (palette_image(1), (1, 0, 0), GREY_OF_RED),
    "RGB": (one_pixel("RGB", RED), (1, 0, 0), GREY_OF_RED),
    "RGBA, a fifth": (one_pixel("RGBA", (*RED, 51)), (1, 0.8, 0.8), 219 / 255),
    "CMYK": (one_pixel("CMYK", (0, 255, 255, 0)), (1, 0, 0), GREY_OF_RED),
    "I": (one_pixel("I", 32768), (32768 / 65535,) * 3, 32768 / 65535),
    "F": (one_pixel("F", 0.3), (0.3, 0.3, 0.3), 0.3),
}


@cases("name", COLOURS)
def test_every_mode_has_its_colour(name):
    image, colour, grey = COLOURS[name]
    for found, expected in zip(levels(image), (colour, [grey]), strict=True):
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=1e-6)


@cases("mode, channels", [("1", 1), ("PA", 3), ("YCbCr", 1), ("HSV", 3), ("I;16B", 3)])
def test_the_result_is_in_minus_one_to_one(mode, channels):
    pixels = resize(Image.effect_noise((13, 9), 90).convert(mode), channels=channels)
    assert pixels.shape == (channels, 8, 12)
    assert -1 <= pixels.min() < pixels.max() <= 1


@cases(
    ("mode", "values", "told"),
    [("F", [0.0, 255.0], r"'F' has values from 0 to 255; only \[0, 1\]"), ("F", [0.0, float("nan")], "nan"),
     ("I", [-1, 65535], r"'I' has values from -1 to 65535; only \[0, 65535\]")],
)  # fmt: skip
def test_values_of_unknown_scale_are_an_error(mode, values, told):
    image = Image.new(mode, (2, 1))
    for column, value in enumerate(values):
        image.putpixel((column, 0), value)
    with pytest.raises(LabError, match=f"{told}.*Rescale it"):
        resize(image)


@cases(("size", "resized"), [((4, 4), (8, 8)), ((16, 32), (16, 8)), ((100, 9), (8, 89)), ((1, 5), (40, 8))])
def test_the_shorter_side_becomes_the_resolution(size, resized):
    width, height = size
    assert resize(Image.new("L", (width, height))).shape == (1, *resized)


@given(arrays(np.uint16, (8, 8)))
def test_16_bit_values_are_kept_unless_8_bits_are_asked_for(values):
    levels = ((resize(Image.fromarray(values))[0].double() + 1) / 2 * 65535).round().long()
    assert torch.equal(torch.from_numpy(values.astype(np.int64)), levels)
    rounded = (resize(Image.fromarray(values), eight_bit=True)[0] + 1) / 2 * 255
    torch.testing.assert_close(rounded, (levels / 257).round().float(), rtol=0, atol=1e-4)


def test_resizing_is_antialiased():
    stripes = np.zeros((32, 32), np.uint8)
    stripes[:, ::4] = 255
    inner = resize(Image.fromarray(stripes))[0, :, 1:-1]
    torch.testing.assert_close(inner, torch.full((8, 6), -0.5))


def rising(height, width):
    """An image that tells every pixel apart, as a tensor that is resized already."""
    return torch.arange(height * width, dtype=torch.float32).reshape(1, height, width)


@cases(("height", "width", "top", "left"), [(8, 8, 0, 0), (8, 13, 0, 2), (13, 8, 2, 0), (8, 9, 0, 0)])
def test_centre_crop_takes_the_middle(height, width, top, left):
    image = rising(height, width)
    expected = image[:, top : top + 8, left : left + 8]
    assert torch.equal(transform().augment(image[None], [3])[0], expected)
    assert torch.equal(transform(center_crop=False, random_flip=True).fixed(image), expected)


def test_random_crops_and_flips_are_squares_out_of_the_image_at_every_position():
    image, numbers = rising(9, 12), range(600)
    crops = transform(center_crop=False, random_flip=True).augment(image.expand(600, -1, -1, -1), numbers)
    found = set()
    for crop in crops:
        is_flipped = bool(crop[0, 0, 0] > crop[0, 0, 1])
        crop = crop.flip(-1) if is_flipped else crop
        top, left = divmod(int(crop[0, 0, 0]), 12)
        assert torch.equal(crop, image[:, top : top + 8, left : left + 8])
        found.add((top, left, is_flipped))
    assert len(found) == 2 * 5 * 2
    assert 250 < sum(bool(crop[0, 0, 0] > crop[0, 0, 1]) for crop in crops) < 350  # half are flipped


@cases("size, crop", [((8, 8), "centre"), ((8, 13), "random"), ((11, 8), "random"), ((8, 13), "centre")])
def test_augmenting_depends_on_seed_and_image_number_alone(size, crop):
    made = [transform(center_crop=crop == "centre", random_flip=True, seed=seed) for seed in (3, 4)]
    images, numbers = torch.rand(40, 1, *size), range(5, 45)
    alone = torch.cat([made[0].augment(image[None], [number]) for image, number in zip(images, numbers, strict=True)])
    assert torch.equal(made[0].augment(images, numbers), alone)
    assert not torch.equal(alone, made[0].fixed(images))
    assert not torch.equal(alone, made[1].augment(images, numbers))


def test_levels_become_the_numbers_that_division_makes_of_them():
    levels = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(levels.astype(np.float32) / 255) * 2 - 1
    compact = transform(resolution=16).resize(Image.fromarray(levels.reshape(16, 16)))
    assert compact.dtype == torch.uint8
    assert torch.equal(normalise(compact).flatten(), expected)
    assert torch.equal(normalise(expected), expected)


def exif(*tags):
    """EXIF data with tags of any type: number, type, content of at most four bytes."""
    entries = b"".join(struct.pack("<HHI", tag, kind, 1) + content.ljust(4, b"\0") for tag, kind, content in sorted(tags))
    return b"Exif\0\0" + struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4)


TAGS = sorted({int(tag) for tag in ExifTags.Base} - {0x0112})
XMP = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.filterwarnings("ignore")  # PIL warns of tags that it does not understand
@cases(("kind", "content"), [(1, b"H"), (2, b"72\0"), (3, b"H\0"), (5, b"\x08"), (9, b"\xff" * 4), (12, b"\x08")])
def test_tags_of_other_types_do_not_keep_a_picture_from_being_turned(kind, content):
    plain = encoded(Image.effect_noise((6, 4), 60), format="jpeg")["bytes"]
    expected = np.rot90(np.asarray(Image.open(io.BytesIO(plain))), -1)
    turned = (0x0112, 3, b"\6\0")
    for data in [exif(turned), XMP, *(exif(turned, (tag, kind, content)) for tag in (*TAGS, 0x8825))]:
        segment = b"\xff\xe1" + struct.pack(">H", len(data) + 2) + data
        image = decode({"bytes": plain[:2] + segment + plain[2:], "path": None})
        assert np.array_equal(np.asarray(image), expected)


@cases("orientation, kind", [*zip(range(10), ["jpeg", "png", "tiff", "webp"] * 3, strict=False)])
def test_an_orientation_does_what_it_does_in_pil(orientation, kind):
    tags = Image.Exif()
    tags[0x0112] = orientation
    cell = encoded(Image.effect_noise((6, 4), 60), format=kind, exif=tags)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(cell["bytes"])))
    assert np.array_equal(np.asarray(decode(cell)), np.asarray(expected))


def test_errors_of_decoders_are_those_of_their_file_but_for_a_lack_of_memory(monkeypatch):
    for error in (OverflowError("too large"), KeyError("key"), ZeroDivisionError()):
        monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", Mock(side_effect=error))
        with pytest.raises(LabError, match=r"The image 'folder/picture\.png' cannot be read: .*--skip_corrupt_images"):
            transform().read(encoded(Image.new("L", (2, 2))))
    monkeypatch.setattr("PIL.Image.open", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        transform().read(encoded(Image.new("L", (2, 2))))


PNG = encoded(Image.effect_noise((16, 16), 60))["bytes"]
BROKEN = {
    "truncated": {"bytes": PNG[: len(PNG) // 2], "path": "a/half.png"},
    "corrupt": {"bytes": PNG[:60] + b"\0" * (len(PNG) - 60), "path": "a/zeros.png"},
    "missing file": {"bytes": None, "path": "/nowhere/missing.png"},
    "unknown scale": {**encoded(Image.new("F", (2, 2), 7.0), format="tiff"), "path": "a/float.tiff"},
    "no bytes and no path": {"bytes": None, "path": None},
    "empty cell": None,
}


@cases("name", BROKEN)
def test_an_image_that_cannot_be_read_is_named_with_the_remedy(name):
    cell = BROKEN[name]
    with pytest.raises(LabError, match="--skip_corrupt_images") as caught:
        transform().read(cell)
    assert repr((cell and cell["path"]) or "(embedded bytes)") in str(caught.value)
