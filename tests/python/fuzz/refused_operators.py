"""Operators of torch's database of which `moe_mlir.compile` refuses all samples, or some."""

REFUSED = frozenset("""
    __getitem__ __rmatmul__ __rpow__ _batch_norm_with_update _native_batch_norm_legit
    _segment_reduce_lengths _segment_reduce_offsets _unsafe_masked_index_put_accumulate
    _upsample_bilinear2d_aa addbmm addmm allclose angle argsort argwhere as_strided as_strided_copy
    as_strided_partial_views as_strided_scatter bernoulli bincount bucketize cauchy cdist cdouble cfloat
    chalf cholesky cholesky_inverse cholesky_solve combinations complex copysign corrcoef cov cummax cummin
    diagonal_scatter digamma dist equal erfinv exponential fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2
    fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn
    fft_rfft fft_rfft2 fft_rfftn fmax fmin frexp gcd geometric geqrf grid_sampler_2d grid_sampler_3d
    hash_tensor histc histogram histogramdd hypot i0 igamma igammac index_add index_put index_reduce_amax
    index_reduce_amin index_reduce_mean index_reduce_prod index_select isin item kthvalue lcm lgamma
    linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig linalg_eigh linalg_eigvals
    linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor
    linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lstsq_grad_oriented linalg_lu linalg_lu_factor
    linalg_lu_factor_ex linalg_lu_solve linalg_matrix_norm linalg_matrix_power linalg_matrix_rank
    linalg_matrix_rank_hermitian linalg_norm linalg_norm_subgradients_at_zero linalg_pinv
    linalg_pinv_hermitian linalg_pinv_singular linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
    linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vector_norm
    log_normal logdet lu lu_solve lu_unpack masked_median masked_norm masked_normalize masked_select matmul
    matrix_exp max_pool2d_with_indices_backward median mode msort multinomial mvlgamma_mvlgamma_p_1
    mvlgamma_mvlgamma_p_3 mvlgamma_mvlgamma_p_5 nanmedian nanquantile narrow native_batch_norm
    native_group_norm native_layer_norm new_empty_strided nextafter nn_functional_adaptive_avg_pool1d
    nn_functional_adaptive_avg_pool2d nn_functional_adaptive_avg_pool3d nn_functional_adaptive_max_pool1d
    nn_functional_adaptive_max_pool2d nn_functional_adaptive_max_pool3d nn_functional_alpha_dropout
    nn_functional_avg_pool1d nn_functional_avg_pool2d nn_functional_avg_pool3d nn_functional_batch_norm
    nn_functional_bilinear nn_functional_conv1d nn_functional_conv2d nn_functional_conv3d
    nn_functional_conv_transpose1d nn_functional_conv_transpose2d nn_functional_conv_transpose3d
    nn_functional_ctc_loss nn_functional_dropout nn_functional_dropout2d nn_functional_dropout3d
    nn_functional_embedding nn_functional_embedding_bag nn_functional_feature_alpha_dropout_with_train
    nn_functional_fractional_max_pool2d nn_functional_fractional_max_pool3d nn_functional_gaussian_nll_loss
    nn_functional_grid_sample nn_functional_group_norm nn_functional_instance_norm
    nn_functional_interpolate_area nn_functional_interpolate_bicubic nn_functional_interpolate_bilinear
    nn_functional_interpolate_nearest nn_functional_interpolate_nearest-exact
    nn_functional_interpolate_trilinear nn_functional_linear_cross_entropy_chunked
    nn_functional_linear_cross_entropy_chunked_none nn_functional_local_response_norm
    nn_functional_max_pool2d nn_functional_max_pool3d nn_functional_multi_head_attention_forward
    nn_functional_normalize nn_functional_one_hot nn_functional_pad_circular nn_functional_pairwise_distance
    nn_functional_pdist nn_functional_rrelu nn_functional_scaled_dot_product_attention
    nn_functional_upsample_bilinear nn_functional_upsample_nearest nonzero nonzero_static norm norm_inf
    norm_nuc normal normal_in_place normal_number_mean ormqr pca_lowrank pinverse polar
    polygamma_polygamma_n_0 polygamma_polygamma_n_1 polygamma_polygamma_n_2 polygamma_polygamma_n_3
    polygamma_polygamma_n_4 pow put qr quantile rand_like randint_like randn_like renorm repeat_interleave
    resize_ resize_as_ round_decimals_0 round_decimals_3 round_decimals_neg_3 scatter scatter_add
    scatter_reduce_amax scatter_reduce_amin scatter_reduce_mean scatter_reduce_prod scatter_reduce_sum
    searchsorted sort special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0
    special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_erfcx special_hermite_polynomial_h
    special_hermite_polynomial_he special_i0e special_i1 special_i1e special_laguerre_polynomial_l
    special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
    special_polygamma_special_polygamma_n_0 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta stft svd svd_lowrank
    take tensor_split to_sparse topk triangular_solve unfold unfold_copy uniform unique unique_consecutive
    view_as_complex
""".split())
