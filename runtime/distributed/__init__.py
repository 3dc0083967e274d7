"""Runs training in several processes: starts the processes, makes collective calls, handles signals, and detects
processes that hang.
"""
