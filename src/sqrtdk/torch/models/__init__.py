"""Audits of whole models: declared scales, inputs, effects of single heads."""
