"""Submissions to the parameter-golf challenge: one file that trains, quantizes and scores a model without specc."""
