"""The function of torchvision that scripts call themselves."""


def crop(image, top, left, height, width):
    return image.crop((left, top, left + width, top + height))
