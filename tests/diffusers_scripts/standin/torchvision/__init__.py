"""What diffusers' example scripts use of torchvision, by PIL and torch: there is no build of it for CPUs alone."""

from . import transforms as transforms

__version__ = "0.0"
