"""Attention on arrays: the call and its checks, the engines that compute it."""
