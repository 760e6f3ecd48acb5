"""Capture Gated DeltaNet and Kimi Delta Attention blocks once; replay them for every packed batch inside a tier."""
