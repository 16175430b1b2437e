"""Where one engine's pipeline is cut, beside what its requests draft: `POLICY+stages:CHOICE`.

Fleets of pipelines are models/pipeline's matter.
"""
