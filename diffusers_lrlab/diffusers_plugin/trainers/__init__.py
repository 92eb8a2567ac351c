"""Trainers whose loops live in modules: how they are recognised, and what the launcher replaces there."""
