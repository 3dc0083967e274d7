"""Submissions to the parameter-golf challenge. A submission trains, quantizes and scores a model without specc."""
