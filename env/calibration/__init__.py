"""Fits of step times, acceptance and drift to measured engines."""
