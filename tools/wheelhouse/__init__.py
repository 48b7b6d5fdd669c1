"""Wheels for machines without internet: plan, fetch, pack, unpack, verify."""
