"""Stores: what implements runtime.store.SessionStore."""
