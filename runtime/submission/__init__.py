"""One file that trains, quantizes and scores a model without specc: what parameter-golf accepts."""
