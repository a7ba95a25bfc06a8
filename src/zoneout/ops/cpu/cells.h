/* Made from cells/built_in.py by `python -m zoneout.ops.cpu`. Included once per type. */

static void NAME(lstm_forward_zoneout)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict bias_x_0 = s->bias_x[0];
    REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict bias_x_1 = s->bias_x[1];
    REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict bias_x_2 = s->bias_x[2];
    REAL *restrict gate_3 = s->gate[3];
    const REAL *restrict bias_x_3 = s->bias_x[3];
    const REAL *restrict old_1 = s->old[1];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict zone_1 = s->zone[1];
    REAL *restrict new_0 = s->new[0];
    REAL *restrict new_1 = s->new[1];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j] + bias_x_0[j];
        REAL v1 = SIGMOID(v0);
        REAL v2 = gate_1[j] + bias_x_1[j];
        REAL v3 = SIGMOID(v2);
        REAL v4 = gate_2[j] + bias_x_2[j];
        REAL v5 = TANH(v4);
        REAL v6 = gate_3[j] + bias_x_3[j];
        REAL v7 = SIGMOID(v6);
        REAL v8 = old_1[j];
        REAL v9 = (v3 * v8);
        REAL v10 = (v1 * v5);
        REAL v11 = (v9 + v10);
        REAL v12 = TANH(v11);
        REAL v13 = (v7 * v12);
        REAL v14 = old_0[j];
        REAL v15 = zone_0[j];
        REAL v16 = MIX(v13, v14, v15);
        REAL v17 = zone_1[j];
        REAL v18 = MIX(v11, v8, v17);
        gate_0[j] = v1;
        gate_1[j] = v3;
        gate_2[j] = v5;
        gate_3[j] = v7;
        new_0[j] = v16;
        new_1[j] = v18;
    }
}

static void NAME(lstm_backward_zoneout)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict dstate_1 = s->dstate[1];
    const REAL *restrict zone_1 = s->zone[1];
    REAL *restrict dstate_0 = s->dstate[0];
    const REAL *restrict dy = s->dy;
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict gate_3 = s->gate[3];
    const REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict old_1 = s->old[1];
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict gate_2 = s->gate[2];
    REAL *restrict dx_0 = s->dx[0];
    REAL *restrict dx_1 = s->dx[1];
    REAL *restrict dx_2 = s->dx[2];
    REAL *restrict dx_3 = s->dx[3];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = dstate_1[j];
        REAL v1 = zone_1[j];
        REAL v2 = ((REAL)1.0 - v1);
        REAL v3 = (v0 * v2);
        REAL v4 = dstate_0[j] + dy[j];
        REAL v5 = zone_0[j];
        REAL v6 = ((REAL)1.0 - v5);
        REAL v7 = (v4 * v6);
        REAL v8 = gate_3[j];
        REAL v9 = (v7 * v8);
        REAL v10 = gate_1[j];
        REAL v11 = old_1[j];
        REAL v12 = (v10 * v11);
        REAL v13 = gate_0[j];
        REAL v14 = gate_2[j];
        REAL v15 = (v13 * v14);
        REAL v16 = (v12 + v15);
        REAL v17 = TANH(v16);
        REAL v18 = (v17 * v17);
        REAL v19 = ((REAL)1.0 - v18);
        REAL v20 = (v9 * v19);
        REAL v21 = (v3 + v20);
        REAL v22 = (v21 * v14);
        REAL v23 = ((REAL)1.0 - v13);
        REAL v24 = (v13 * v23);
        REAL v25 = (v22 * v24);
        REAL v26 = (v21 * v11);
        REAL v27 = ((REAL)1.0 - v10);
        REAL v28 = (v10 * v27);
        REAL v29 = (v26 * v28);
        REAL v30 = (v21 * v13);
        REAL v31 = (v14 * v14);
        REAL v32 = ((REAL)1.0 - v31);
        REAL v33 = (v30 * v32);
        REAL v34 = (v7 * v17);
        REAL v35 = ((REAL)1.0 - v8);
        REAL v36 = (v8 * v35);
        REAL v37 = (v34 * v36);
        REAL v38 = (v4 * v5);
        REAL v39 = (v0 * v1);
        REAL v40 = (v21 * v10);
        REAL v41 = (v39 + v40);
        dx_0[j] = v25;
        dx_1[j] = v29;
        dx_2[j] = v33;
        dx_3[j] = v37;
        dstate_0[j] = v38;
        dstate_1[j] = v41;
    }
}

static void NAME(lstm_again_zoneout)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict gate_3 = s->gate[3];
    const REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict old_1 = s->old[1];
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict zone_1 = s->zone[1];
    REAL *restrict new_0 = s->new[0];
    REAL *restrict new_1 = s->new[1];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_3[j];
        REAL v1 = gate_1[j];
        REAL v2 = old_1[j];
        REAL v3 = (v1 * v2);
        REAL v4 = gate_0[j];
        REAL v5 = gate_2[j];
        REAL v6 = (v4 * v5);
        REAL v7 = (v3 + v6);
        REAL v8 = TANH(v7);
        REAL v9 = (v0 * v8);
        REAL v10 = old_0[j];
        REAL v11 = zone_0[j];
        REAL v12 = MIX(v9, v10, v11);
        REAL v13 = zone_1[j];
        REAL v14 = MIX(v7, v2, v13);
        new_0[j] = v12;
        new_1[j] = v14;
    }
}

static void NAME(lstm_forward_all)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict bias_x_0 = s->bias_x[0];
    REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict bias_x_1 = s->bias_x[1];
    REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict bias_x_2 = s->bias_x[2];
    REAL *restrict gate_3 = s->gate[3];
    const REAL *restrict bias_x_3 = s->bias_x[3];
    const REAL *restrict held = s->held;
    const REAL *restrict hold = s->hold;
    const REAL *restrict old_1 = s->old[1];
    const REAL *restrict update = s->update;
    const REAL *restrict zero_1 = s->zero[1];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict zone_1 = s->zone[1];
    REAL *restrict new_0 = s->new[0];
    REAL *restrict new_1 = s->new[1];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j] + bias_x_0[j];
        REAL v1 = SIGMOID(v0);
        REAL v2 = gate_1[j] + bias_x_1[j];
        REAL v3 = SIGMOID(v2);
        REAL v4 = gate_2[j] + bias_x_2[j];
        REAL v5 = TANH(v4);
        REAL v6 = gate_3[j] + bias_x_3[j];
        REAL v7 = SIGMOID(v6);
        REAL v8 = held[j];
        REAL v9 = hold[j];
        REAL v10 = MIX(v7, v8, v9);
        REAL v11 = old_1[j];
        REAL v12 = (v3 * v11);
        REAL v13 = (v1 * v5);
        REAL v14 = update[j];
        REAL v15 = LESS(v13, v14);
        REAL v16 = (v12 + v15);
        REAL v17 = zero_1[j];
        REAL v18 = LESS(v16, v17);
        REAL v19 = TANH(v18);
        REAL v20 = (v10 * v19);
        REAL v21 = zero_0[j];
        REAL v22 = LESS(v20, v21);
        REAL v23 = old_0[j];
        REAL v24 = zone_0[j];
        REAL v25 = MIX(v22, v23, v24);
        REAL v26 = zone_1[j];
        REAL v27 = MIX(v18, v11, v26);
        gate_0[j] = v1;
        gate_1[j] = v3;
        gate_2[j] = v5;
        gate_3[j] = v7;
        new_0[j] = v25;
        new_1[j] = v27;
    }
}

static void NAME(lstm_backward_all)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict dstate_1 = s->dstate[1];
    const REAL *restrict zone_1 = s->zone[1];
    REAL *restrict dstate_0 = s->dstate[0];
    const REAL *restrict dy = s->dy;
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict gate_3 = s->gate[3];
    const REAL *restrict held = s->held;
    const REAL *restrict hold = s->hold;
    const REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict old_1 = s->old[1];
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict update = s->update;
    const REAL *restrict zero_1 = s->zero[1];
    REAL *restrict owed = s->owed;
    REAL *restrict dx_0 = s->dx[0];
    REAL *restrict dx_1 = s->dx[1];
    REAL *restrict dx_2 = s->dx[2];
    REAL *restrict dx_3 = s->dx[3];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = dstate_1[j];
        REAL v1 = zone_1[j];
        REAL v2 = ((REAL)1.0 - v1);
        REAL v3 = (v0 * v2);
        REAL v4 = dstate_0[j] + dy[j];
        REAL v5 = zone_0[j];
        REAL v6 = ((REAL)1.0 - v5);
        REAL v7 = (v4 * v6);
        REAL v8 = zero_0[j];
        REAL v9 = ((REAL)1.0 - v8);
        REAL v10 = (v7 * v9);
        REAL v11 = gate_3[j];
        REAL v12 = held[j];
        REAL v13 = hold[j];
        REAL v14 = MIX(v11, v12, v13);
        REAL v15 = (v10 * v14);
        REAL v16 = gate_1[j];
        REAL v17 = old_1[j];
        REAL v18 = (v16 * v17);
        REAL v19 = gate_0[j];
        REAL v20 = gate_2[j];
        REAL v21 = (v19 * v20);
        REAL v22 = update[j];
        REAL v23 = LESS(v21, v22);
        REAL v24 = (v18 + v23);
        REAL v25 = zero_1[j];
        REAL v26 = LESS(v24, v25);
        REAL v27 = TANH(v26);
        REAL v28 = (v27 * v27);
        REAL v29 = ((REAL)1.0 - v28);
        REAL v30 = (v15 * v29);
        REAL v31 = (v3 + v30);
        REAL v32 = ((REAL)1.0 - v25);
        REAL v33 = (v31 * v32);
        REAL v34 = ((REAL)1.0 - v22);
        REAL v35 = (v33 * v34);
        REAL v36 = (v35 * v20);
        REAL v37 = ((REAL)1.0 - v19);
        REAL v38 = (v19 * v37);
        REAL v39 = (v36 * v38);
        REAL v40 = (v33 * v17);
        REAL v41 = ((REAL)1.0 - v16);
        REAL v42 = (v16 * v41);
        REAL v43 = (v40 * v42);
        REAL v44 = (v35 * v19);
        REAL v45 = (v20 * v20);
        REAL v46 = ((REAL)1.0 - v45);
        REAL v47 = (v44 * v46);
        REAL v48 = owed[j];
        REAL v49 = (v10 * v27);
        REAL v50 = ((REAL)1.0 - v13);
        REAL v51 = (v49 * v50);
        REAL v52 = (v48 + v51);
        REAL v53 = ((REAL)1.0 - v11);
        REAL v54 = (v11 * v53);
        REAL v55 = (v52 * v54);
        REAL v56 = (v4 * v5);
        REAL v57 = (v0 * v1);
        REAL v58 = (v33 * v16);
        REAL v59 = (v57 + v58);
        REAL v60 = (v49 * v13);
        dx_0[j] = v39;
        dx_1[j] = v43;
        dx_2[j] = v47;
        dx_3[j] = v55;
        dstate_0[j] = v56;
        dstate_1[j] = v59;
        owed[j] = v60;
    }
}

static void NAME(lstm_again_all)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict gate_3 = s->gate[3];
    const REAL *restrict held = s->held;
    const REAL *restrict hold = s->hold;
    const REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict old_1 = s->old[1];
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict update = s->update;
    const REAL *restrict zero_1 = s->zero[1];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict zone_1 = s->zone[1];
    REAL *restrict new_0 = s->new[0];
    REAL *restrict new_1 = s->new[1];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_3[j];
        REAL v1 = held[j];
        REAL v2 = hold[j];
        REAL v3 = MIX(v0, v1, v2);
        REAL v4 = gate_1[j];
        REAL v5 = old_1[j];
        REAL v6 = (v4 * v5);
        REAL v7 = gate_0[j];
        REAL v8 = gate_2[j];
        REAL v9 = (v7 * v8);
        REAL v10 = update[j];
        REAL v11 = LESS(v9, v10);
        REAL v12 = (v6 + v11);
        REAL v13 = zero_1[j];
        REAL v14 = LESS(v12, v13);
        REAL v15 = TANH(v14);
        REAL v16 = (v3 * v15);
        REAL v17 = zero_0[j];
        REAL v18 = LESS(v16, v17);
        REAL v19 = old_0[j];
        REAL v20 = zone_0[j];
        REAL v21 = MIX(v18, v19, v20);
        REAL v22 = zone_1[j];
        REAL v23 = MIX(v14, v5, v22);
        new_0[j] = v21;
        new_1[j] = v23;
    }
}

static void NAME(lstm_forward_given)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict bias_x_0 = s->bias_x[0];
    REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict bias_x_1 = s->bias_x[1];
    REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict bias_x_2 = s->bias_x[2];
    REAL *restrict gate_3 = s->gate[3];
    const REAL *restrict bias_x_3 = s->bias_x[3];
    const REAL *restrict held = s->held;
    const REAL *restrict hold = s->hold;
    const REAL *restrict old_1 = s->old[1];
    const REAL *restrict update = s->update;
    const REAL *restrict zero_1 = s->zero[1];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict drop_0 = s->drop[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict add_0 = s->add[0];
    const REAL *restrict drop_1 = s->drop[1];
    const REAL *restrict zone_1 = s->zone[1];
    const REAL *restrict add_1 = s->add[1];
    REAL *restrict new_0 = s->new[0];
    REAL *restrict new_1 = s->new[1];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j] + bias_x_0[j];
        REAL v1 = SIGMOID(v0);
        REAL v2 = gate_1[j] + bias_x_1[j];
        REAL v3 = SIGMOID(v2);
        REAL v4 = gate_2[j] + bias_x_2[j];
        REAL v5 = TANH(v4);
        REAL v6 = gate_3[j] + bias_x_3[j];
        REAL v7 = SIGMOID(v6);
        REAL v8 = held[j];
        REAL v9 = hold[j];
        REAL v10 = MIX(v7, v8, v9);
        REAL v11 = old_1[j];
        REAL v12 = (v3 * v11);
        REAL v13 = (v1 * v5);
        REAL v14 = update[j];
        REAL v15 = LESS(v13, v14);
        REAL v16 = (v12 + v15);
        REAL v17 = zero_1[j];
        REAL v18 = LESS(v16, v17);
        REAL v19 = TANH(v18);
        REAL v20 = (v10 * v19);
        REAL v21 = zero_0[j];
        REAL v22 = LESS(v20, v21);
        REAL v23 = drop_0[j];
        REAL v24 = LESS(v22, v23);
        REAL v25 = old_0[j];
        REAL v26 = zone_0[j];
        REAL v27 = MIX(v24, v25, v26);
        REAL v28 = add_0[j];
        REAL v29 = ALSO(v27, v25, v28);
        REAL v30 = drop_1[j];
        REAL v31 = LESS(v18, v30);
        REAL v32 = zone_1[j];
        REAL v33 = MIX(v31, v11, v32);
        REAL v34 = add_1[j];
        REAL v35 = ALSO(v33, v11, v34);
        gate_0[j] = v1;
        gate_1[j] = v3;
        gate_2[j] = v5;
        gate_3[j] = v7;
        new_0[j] = v29;
        new_1[j] = v35;
    }
}

static void NAME(lstm_backward_given)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict dstate_1 = s->dstate[1];
    const REAL *restrict zone_1 = s->zone[1];
    const REAL *restrict drop_1 = s->drop[1];
    REAL *restrict dstate_0 = s->dstate[0];
    const REAL *restrict dy = s->dy;
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict drop_0 = s->drop[0];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict gate_3 = s->gate[3];
    const REAL *restrict held = s->held;
    const REAL *restrict hold = s->hold;
    const REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict old_1 = s->old[1];
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict update = s->update;
    const REAL *restrict zero_1 = s->zero[1];
    REAL *restrict owed = s->owed;
    const REAL *restrict add_0 = s->add[0];
    const REAL *restrict add_1 = s->add[1];
    const REAL *restrict old_0 = s->old[0];
    REAL *restrict dx_0 = s->dx[0];
    REAL *restrict dx_1 = s->dx[1];
    REAL *restrict dx_2 = s->dx[2];
    REAL *restrict dx_3 = s->dx[3];
    REAL *restrict dhold = s->dhold;
    REAL *restrict dupdate = s->dupdate;
    REAL *restrict dzero_1 = s->dzero[1];
    REAL *restrict dzero_0 = s->dzero[0];
    REAL *restrict ddrop_0 = s->ddrop[0];
    REAL *restrict dzone_0 = s->dzone[0];
    REAL *restrict dadd_0 = s->dadd[0];
    REAL *restrict ddrop_1 = s->ddrop[1];
    REAL *restrict dzone_1 = s->dzone[1];
    REAL *restrict dadd_1 = s->dadd[1];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = dstate_1[j];
        REAL v1 = zone_1[j];
        REAL v2 = ((REAL)1.0 - v1);
        REAL v3 = (v0 * v2);
        REAL v4 = drop_1[j];
        REAL v5 = ((REAL)1.0 - v4);
        REAL v6 = (v3 * v5);
        REAL v7 = dstate_0[j] + dy[j];
        REAL v8 = zone_0[j];
        REAL v9 = ((REAL)1.0 - v8);
        REAL v10 = (v7 * v9);
        REAL v11 = drop_0[j];
        REAL v12 = ((REAL)1.0 - v11);
        REAL v13 = (v10 * v12);
        REAL v14 = zero_0[j];
        REAL v15 = ((REAL)1.0 - v14);
        REAL v16 = (v13 * v15);
        REAL v17 = gate_3[j];
        REAL v18 = held[j];
        REAL v19 = hold[j];
        REAL v20 = MIX(v17, v18, v19);
        REAL v21 = (v16 * v20);
        REAL v22 = gate_1[j];
        REAL v23 = old_1[j];
        REAL v24 = (v22 * v23);
        REAL v25 = gate_0[j];
        REAL v26 = gate_2[j];
        REAL v27 = (v25 * v26);
        REAL v28 = update[j];
        REAL v29 = LESS(v27, v28);
        REAL v30 = (v24 + v29);
        REAL v31 = zero_1[j];
        REAL v32 = LESS(v30, v31);
        REAL v33 = TANH(v32);
        REAL v34 = (v33 * v33);
        REAL v35 = ((REAL)1.0 - v34);
        REAL v36 = (v21 * v35);
        REAL v37 = (v6 + v36);
        REAL v38 = ((REAL)1.0 - v31);
        REAL v39 = (v37 * v38);
        REAL v40 = ((REAL)1.0 - v28);
        REAL v41 = (v39 * v40);
        REAL v42 = (v41 * v26);
        REAL v43 = ((REAL)1.0 - v25);
        REAL v44 = (v25 * v43);
        REAL v45 = (v42 * v44);
        REAL v46 = (v39 * v23);
        REAL v47 = ((REAL)1.0 - v22);
        REAL v48 = (v22 * v47);
        REAL v49 = (v46 * v48);
        REAL v50 = (v41 * v25);
        REAL v51 = (v26 * v26);
        REAL v52 = ((REAL)1.0 - v51);
        REAL v53 = (v50 * v52);
        REAL v54 = owed[j];
        REAL v55 = (v16 * v33);
        REAL v56 = ((REAL)1.0 - v19);
        REAL v57 = (v55 * v56);
        REAL v58 = (v54 + v57);
        REAL v59 = ((REAL)1.0 - v17);
        REAL v60 = (v17 * v59);
        REAL v61 = (v58 * v60);
        REAL v62 = add_0[j];
        REAL v63 = (v7 * v62);
        REAL v64 = (v7 * v8);
        REAL v65 = (v63 + v64);
        REAL v66 = add_1[j];
        REAL v67 = (v0 * v66);
        REAL v68 = (v0 * v1);
        REAL v69 = (v67 + v68);
        REAL v70 = (v39 * v22);
        REAL v71 = (v69 + v70);
        REAL v72 = (v55 * v19);
        REAL v73 = (v18 - v17);
        REAL v74 = (v55 * v73);
        REAL v75 = (v39 * v27);
        REAL v76 = (-v75);
        REAL v77 = (v37 * v30);
        REAL v78 = (-v77);
        REAL v79 = (v20 * v33);
        REAL v80 = (v13 * v79);
        REAL v81 = (-v80);
        REAL v82 = LESS(v79, v14);
        REAL v83 = (v10 * v82);
        REAL v84 = (-v83);
        REAL v85 = old_0[j];
        REAL v86 = LESS(v82, v11);
        REAL v87 = (v85 - v86);
        REAL v88 = (v7 * v87);
        REAL v89 = (v7 * v85);
        REAL v90 = (v3 * v32);
        REAL v91 = (-v90);
        REAL v92 = LESS(v32, v4);
        REAL v93 = (v23 - v92);
        REAL v94 = (v0 * v93);
        REAL v95 = (v0 * v23);
        dx_0[j] = v45;
        dx_1[j] = v49;
        dx_2[j] = v53;
        dx_3[j] = v61;
        dstate_0[j] = v65;
        dstate_1[j] = v71;
        owed[j] = v72;
        dhold[j] = v74;
        dupdate[j] = v76;
        dzero_1[j] = v78;
        dzero_0[j] = v81;
        ddrop_0[j] = v84;
        dzone_0[j] = v88;
        dadd_0[j] = v89;
        ddrop_1[j] = v91;
        dzone_1[j] = v94;
        dadd_1[j] = v95;
    }
}

static void NAME(lstm_again_given)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict gate_3 = s->gate[3];
    const REAL *restrict held = s->held;
    const REAL *restrict hold = s->hold;
    const REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict old_1 = s->old[1];
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict update = s->update;
    const REAL *restrict zero_1 = s->zero[1];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict drop_0 = s->drop[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict add_0 = s->add[0];
    const REAL *restrict drop_1 = s->drop[1];
    const REAL *restrict zone_1 = s->zone[1];
    const REAL *restrict add_1 = s->add[1];
    REAL *restrict new_0 = s->new[0];
    REAL *restrict new_1 = s->new[1];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_3[j];
        REAL v1 = held[j];
        REAL v2 = hold[j];
        REAL v3 = MIX(v0, v1, v2);
        REAL v4 = gate_1[j];
        REAL v5 = old_1[j];
        REAL v6 = (v4 * v5);
        REAL v7 = gate_0[j];
        REAL v8 = gate_2[j];
        REAL v9 = (v7 * v8);
        REAL v10 = update[j];
        REAL v11 = LESS(v9, v10);
        REAL v12 = (v6 + v11);
        REAL v13 = zero_1[j];
        REAL v14 = LESS(v12, v13);
        REAL v15 = TANH(v14);
        REAL v16 = (v3 * v15);
        REAL v17 = zero_0[j];
        REAL v18 = LESS(v16, v17);
        REAL v19 = drop_0[j];
        REAL v20 = LESS(v18, v19);
        REAL v21 = old_0[j];
        REAL v22 = zone_0[j];
        REAL v23 = MIX(v20, v21, v22);
        REAL v24 = add_0[j];
        REAL v25 = ALSO(v23, v21, v24);
        REAL v26 = drop_1[j];
        REAL v27 = LESS(v14, v26);
        REAL v28 = zone_1[j];
        REAL v29 = MIX(v27, v5, v28);
        REAL v30 = add_1[j];
        REAL v31 = ALSO(v29, v5, v30);
        new_0[j] = v25;
        new_1[j] = v31;
    }
}

static void NAME(lstm_gates)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict bias_x_0 = s->bias_x[0];
    REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict bias_x_1 = s->bias_x[1];
    REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict bias_x_2 = s->bias_x[2];
    REAL *restrict gate_3 = s->gate[3];
    const REAL *restrict bias_x_3 = s->bias_x[3];
    const REAL *restrict old_1 = s->old[1];
    const REAL *restrict update = s->update;
    const REAL *restrict zero_1 = s->zero[1];
    REAL *restrict raw = s->raw;
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j] + bias_x_0[j];
        REAL v1 = SIGMOID(v0);
        REAL v2 = gate_1[j] + bias_x_1[j];
        REAL v3 = SIGMOID(v2);
        REAL v4 = gate_2[j] + bias_x_2[j];
        REAL v5 = TANH(v4);
        REAL v6 = gate_3[j] + bias_x_3[j];
        REAL v7 = SIGMOID(v6);
        REAL v8 = old_1[j];
        REAL v9 = (v3 * v8);
        REAL v10 = (v1 * v5);
        REAL v11 = update[j];
        REAL v12 = LESS(v10, v11);
        REAL v13 = (v9 + v12);
        REAL v14 = zero_1[j];
        REAL v15 = LESS(v13, v14);
        gate_0[j] = v1;
        gate_1[j] = v3;
        gate_2[j] = v5;
        gate_3[j] = v7;
        raw[j] = v15;
    }
}

static void NAME(lstm_raw)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict old_1 = s->old[1];
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict update = s->update;
    const REAL *restrict zero_1 = s->zero[1];
    REAL *restrict raw = s->raw;
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_1[j];
        REAL v1 = old_1[j];
        REAL v2 = (v0 * v1);
        REAL v3 = gate_0[j];
        REAL v4 = gate_2[j];
        REAL v5 = (v3 * v4);
        REAL v6 = update[j];
        REAL v7 = LESS(v5, v6);
        REAL v8 = (v2 + v7);
        REAL v9 = zero_1[j];
        REAL v10 = LESS(v8, v9);
        raw[j] = v10;
    }
}

static void NAME(lstm_shows)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict gate_3 = s->gate[3];
    const REAL *restrict held = s->held;
    const REAL *restrict hold = s->hold;
    const REAL *restrict shown = s->shown;
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict old_1 = s->old[1];
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict update = s->update;
    const REAL *restrict zero_1 = s->zero[1];
    const REAL *restrict zone_1 = s->zone[1];
    REAL *restrict new_0 = s->new[0];
    REAL *restrict new_1 = s->new[1];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_3[j];
        REAL v1 = held[j];
        REAL v2 = hold[j];
        REAL v3 = MIX(v0, v1, v2);
        REAL v4 = shown[j];
        REAL v5 = TANH(v4);
        REAL v6 = (v3 * v5);
        REAL v7 = zero_0[j];
        REAL v8 = LESS(v6, v7);
        REAL v9 = old_0[j];
        REAL v10 = zone_0[j];
        REAL v11 = MIX(v8, v9, v10);
        REAL v12 = gate_1[j];
        REAL v13 = old_1[j];
        REAL v14 = (v12 * v13);
        REAL v15 = gate_0[j];
        REAL v16 = gate_2[j];
        REAL v17 = (v15 * v16);
        REAL v18 = update[j];
        REAL v19 = LESS(v17, v18);
        REAL v20 = (v14 + v19);
        REAL v21 = zero_1[j];
        REAL v22 = LESS(v20, v21);
        REAL v23 = zone_1[j];
        REAL v24 = MIX(v22, v13, v23);
        new_0[j] = v11;
        new_1[j] = v24;
    }
}

static void NAME(lstm_back_shows)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict dstate_0 = s->dstate[0];
    const REAL *restrict dy = s->dy;
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict gate_3 = s->gate[3];
    const REAL *restrict held = s->held;
    const REAL *restrict hold = s->hold;
    const REAL *restrict shown = s->shown;
    REAL *restrict dshown = s->dshown;
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = dstate_0[j] + dy[j];
        REAL v1 = zone_0[j];
        REAL v2 = ((REAL)1.0 - v1);
        REAL v3 = (v0 * v2);
        REAL v4 = zero_0[j];
        REAL v5 = ((REAL)1.0 - v4);
        REAL v6 = (v3 * v5);
        REAL v7 = gate_3[j];
        REAL v8 = held[j];
        REAL v9 = hold[j];
        REAL v10 = MIX(v7, v8, v9);
        REAL v11 = (v6 * v10);
        REAL v12 = shown[j];
        REAL v13 = TANH(v12);
        REAL v14 = (v13 * v13);
        REAL v15 = ((REAL)1.0 - v14);
        REAL v16 = (v11 * v15);
        dshown[j] = v16;
    }
}

static void NAME(lstm_back_gates)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict draw = s->draw;
    REAL *restrict dstate_1 = s->dstate[1];
    const REAL *restrict zone_1 = s->zone[1];
    const REAL *restrict zero_1 = s->zero[1];
    const REAL *restrict update = s->update;
    const REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict old_1 = s->old[1];
    const REAL *restrict gate_1 = s->gate[1];
    REAL *restrict owed = s->owed;
    REAL *restrict dstate_0 = s->dstate[0];
    const REAL *restrict dy = s->dy;
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict shown = s->shown;
    const REAL *restrict hold = s->hold;
    const REAL *restrict gate_3 = s->gate[3];
    REAL *restrict dx_0 = s->dx[0];
    REAL *restrict dx_1 = s->dx[1];
    REAL *restrict dx_2 = s->dx[2];
    REAL *restrict dx_3 = s->dx[3];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = draw[j];
        REAL v1 = dstate_1[j];
        REAL v2 = zone_1[j];
        REAL v3 = ((REAL)1.0 - v2);
        REAL v4 = (v1 * v3);
        REAL v5 = (v0 + v4);
        REAL v6 = zero_1[j];
        REAL v7 = ((REAL)1.0 - v6);
        REAL v8 = (v5 * v7);
        REAL v9 = update[j];
        REAL v10 = ((REAL)1.0 - v9);
        REAL v11 = (v8 * v10);
        REAL v12 = gate_2[j];
        REAL v13 = (v11 * v12);
        REAL v14 = gate_0[j];
        REAL v15 = ((REAL)1.0 - v14);
        REAL v16 = (v14 * v15);
        REAL v17 = (v13 * v16);
        REAL v18 = old_1[j];
        REAL v19 = (v8 * v18);
        REAL v20 = gate_1[j];
        REAL v21 = ((REAL)1.0 - v20);
        REAL v22 = (v20 * v21);
        REAL v23 = (v19 * v22);
        REAL v24 = (v11 * v14);
        REAL v25 = (v12 * v12);
        REAL v26 = ((REAL)1.0 - v25);
        REAL v27 = (v24 * v26);
        REAL v28 = owed[j];
        REAL v29 = dstate_0[j] + dy[j];
        REAL v30 = zone_0[j];
        REAL v31 = ((REAL)1.0 - v30);
        REAL v32 = (v29 * v31);
        REAL v33 = zero_0[j];
        REAL v34 = ((REAL)1.0 - v33);
        REAL v35 = (v32 * v34);
        REAL v36 = shown[j];
        REAL v37 = TANH(v36);
        REAL v38 = (v35 * v37);
        REAL v39 = hold[j];
        REAL v40 = ((REAL)1.0 - v39);
        REAL v41 = (v38 * v40);
        REAL v42 = (v28 + v41);
        REAL v43 = gate_3[j];
        REAL v44 = ((REAL)1.0 - v43);
        REAL v45 = (v43 * v44);
        REAL v46 = (v42 * v45);
        REAL v47 = (v29 * v30);
        REAL v48 = (v1 * v2);
        REAL v49 = (v8 * v20);
        REAL v50 = (v48 + v49);
        REAL v51 = (v38 * v39);
        dx_0[j] = v17;
        dx_1[j] = v23;
        dx_2[j] = v27;
        dx_3[j] = v46;
        dstate_0[j] = v47;
        dstate_1[j] = v50;
        owed[j] = v51;
    }
}

static void NAME(gru_forward_zoneout)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict bias_x_0 = s->bias_x[0];
    const REAL *restrict r_0 = s->r[0];
    const REAL *restrict bias_r_0 = s->bias_r[0];
    REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict bias_x_1 = s->bias_x[1];
    const REAL *restrict r_1 = s->r[1];
    const REAL *restrict bias_r_1 = s->bias_r[1];
    REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict bias_x_2 = s->bias_x[2];
    const REAL *restrict r_2 = s->r[2];
    const REAL *restrict bias_r_2 = s->bias_r[2];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    REAL *restrict slot_0 = s->slot[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j] + bias_x_0[j];
        REAL v1 = r_0[j] + bias_r_0[j];
        REAL v2 = (v0 + v1);
        REAL v3 = SIGMOID(v2);
        REAL v4 = gate_1[j] + bias_x_1[j];
        REAL v5 = r_1[j] + bias_r_1[j];
        REAL v6 = (v4 + v5);
        REAL v7 = SIGMOID(v6);
        REAL v8 = gate_2[j] + bias_x_2[j];
        REAL v9 = r_2[j] + bias_r_2[j];
        REAL v10 = (v3 * v9);
        REAL v11 = (v8 + v10);
        REAL v12 = TANH(v11);
        REAL v13 = old_0[j];
        REAL v14 = (v7 * v13);
        REAL v15 = ((REAL)1.0 - v7);
        REAL v16 = (v15 * v12);
        REAL v17 = (v14 + v16);
        REAL v18 = zone_0[j];
        REAL v19 = MIX(v17, v13, v18);
        gate_0[j] = v3;
        gate_1[j] = v7;
        gate_2[j] = v12;
        slot_0[j] = v9;
        new_0[j] = v19;
    }
}

static void NAME(gru_backward_zoneout)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict dstate_0 = s->dstate[0];
    const REAL *restrict dy = s->dy;
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict slot_0 = s->slot[0];
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict old_0 = s->old[0];
    REAL *restrict dx_0 = s->dx[0];
    REAL *restrict dx_1 = s->dx[1];
    REAL *restrict dx_2 = s->dx[2];
    REAL *restrict dr_0 = s->dr[0];
    REAL *restrict dr_1 = s->dr[1];
    REAL *restrict dr_2 = s->dr[2];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = dstate_0[j] + dy[j];
        REAL v1 = zone_0[j];
        REAL v2 = ((REAL)1.0 - v1);
        REAL v3 = (v0 * v2);
        REAL v4 = gate_1[j];
        REAL v5 = ((REAL)1.0 - v4);
        REAL v6 = (v3 * v5);
        REAL v7 = gate_2[j];
        REAL v8 = (v7 * v7);
        REAL v9 = ((REAL)1.0 - v8);
        REAL v10 = (v6 * v9);
        REAL v11 = slot_0[j];
        REAL v12 = (v10 * v11);
        REAL v13 = gate_0[j];
        REAL v14 = ((REAL)1.0 - v13);
        REAL v15 = (v13 * v14);
        REAL v16 = (v12 * v15);
        REAL v17 = (v3 * v7);
        REAL v18 = (-v17);
        REAL v19 = old_0[j];
        REAL v20 = (v3 * v19);
        REAL v21 = (v18 + v20);
        REAL v22 = (v4 * v5);
        REAL v23 = (v21 * v22);
        REAL v24 = (v10 * v13);
        REAL v25 = (v0 * v1);
        REAL v26 = (v3 * v4);
        REAL v27 = (v25 + v26);
        dx_0[j] = v16;
        dx_1[j] = v23;
        dx_2[j] = v10;
        dr_0[j] = v16;
        dr_1[j] = v23;
        dr_2[j] = v24;
        dstate_0[j] = v27;
    }
}

static void NAME(gru_again_zoneout)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict zone_0 = s->zone[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_1[j];
        REAL v1 = old_0[j];
        REAL v2 = (v0 * v1);
        REAL v3 = ((REAL)1.0 - v0);
        REAL v4 = gate_2[j];
        REAL v5 = (v3 * v4);
        REAL v6 = (v2 + v5);
        REAL v7 = zone_0[j];
        REAL v8 = MIX(v6, v1, v7);
        new_0[j] = v8;
    }
}

static void NAME(gru_forward_all)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict bias_x_0 = s->bias_x[0];
    const REAL *restrict r_0 = s->r[0];
    const REAL *restrict bias_r_0 = s->bias_r[0];
    REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict bias_x_1 = s->bias_x[1];
    const REAL *restrict r_1 = s->r[1];
    const REAL *restrict bias_r_1 = s->bias_r[1];
    REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict bias_x_2 = s->bias_x[2];
    const REAL *restrict r_2 = s->r[2];
    const REAL *restrict bias_r_2 = s->bias_r[2];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict update = s->update;
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict zone_0 = s->zone[0];
    REAL *restrict slot_0 = s->slot[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j] + bias_x_0[j];
        REAL v1 = r_0[j] + bias_r_0[j];
        REAL v2 = (v0 + v1);
        REAL v3 = SIGMOID(v2);
        REAL v4 = gate_1[j] + bias_x_1[j];
        REAL v5 = r_1[j] + bias_r_1[j];
        REAL v6 = (v4 + v5);
        REAL v7 = SIGMOID(v6);
        REAL v8 = gate_2[j] + bias_x_2[j];
        REAL v9 = r_2[j] + bias_r_2[j];
        REAL v10 = (v3 * v9);
        REAL v11 = (v8 + v10);
        REAL v12 = TANH(v11);
        REAL v13 = old_0[j];
        REAL v14 = (v7 * v13);
        REAL v15 = ((REAL)1.0 - v7);
        REAL v16 = (v15 * v12);
        REAL v17 = update[j];
        REAL v18 = LESS(v16, v17);
        REAL v19 = (v14 + v18);
        REAL v20 = zero_0[j];
        REAL v21 = LESS(v19, v20);
        REAL v22 = zone_0[j];
        REAL v23 = MIX(v21, v13, v22);
        gate_0[j] = v3;
        gate_1[j] = v7;
        gate_2[j] = v12;
        slot_0[j] = v9;
        new_0[j] = v23;
    }
}

static void NAME(gru_backward_all)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict dstate_0 = s->dstate[0];
    const REAL *restrict dy = s->dy;
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict update = s->update;
    const REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict slot_0 = s->slot[0];
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict old_0 = s->old[0];
    REAL *restrict dx_0 = s->dx[0];
    REAL *restrict dx_1 = s->dx[1];
    REAL *restrict dx_2 = s->dx[2];
    REAL *restrict dr_0 = s->dr[0];
    REAL *restrict dr_1 = s->dr[1];
    REAL *restrict dr_2 = s->dr[2];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = dstate_0[j] + dy[j];
        REAL v1 = zone_0[j];
        REAL v2 = ((REAL)1.0 - v1);
        REAL v3 = (v0 * v2);
        REAL v4 = zero_0[j];
        REAL v5 = ((REAL)1.0 - v4);
        REAL v6 = (v3 * v5);
        REAL v7 = update[j];
        REAL v8 = ((REAL)1.0 - v7);
        REAL v9 = (v6 * v8);
        REAL v10 = gate_1[j];
        REAL v11 = ((REAL)1.0 - v10);
        REAL v12 = (v9 * v11);
        REAL v13 = gate_2[j];
        REAL v14 = (v13 * v13);
        REAL v15 = ((REAL)1.0 - v14);
        REAL v16 = (v12 * v15);
        REAL v17 = slot_0[j];
        REAL v18 = (v16 * v17);
        REAL v19 = gate_0[j];
        REAL v20 = ((REAL)1.0 - v19);
        REAL v21 = (v19 * v20);
        REAL v22 = (v18 * v21);
        REAL v23 = (v9 * v13);
        REAL v24 = (-v23);
        REAL v25 = old_0[j];
        REAL v26 = (v6 * v25);
        REAL v27 = (v24 + v26);
        REAL v28 = (v10 * v11);
        REAL v29 = (v27 * v28);
        REAL v30 = (v16 * v19);
        REAL v31 = (v0 * v1);
        REAL v32 = (v6 * v10);
        REAL v33 = (v31 + v32);
        dx_0[j] = v22;
        dx_1[j] = v29;
        dx_2[j] = v16;
        dr_0[j] = v22;
        dr_1[j] = v29;
        dr_2[j] = v30;
        dstate_0[j] = v33;
    }
}

static void NAME(gru_again_all)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict update = s->update;
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict zone_0 = s->zone[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_1[j];
        REAL v1 = old_0[j];
        REAL v2 = (v0 * v1);
        REAL v3 = ((REAL)1.0 - v0);
        REAL v4 = gate_2[j];
        REAL v5 = (v3 * v4);
        REAL v6 = update[j];
        REAL v7 = LESS(v5, v6);
        REAL v8 = (v2 + v7);
        REAL v9 = zero_0[j];
        REAL v10 = LESS(v8, v9);
        REAL v11 = zone_0[j];
        REAL v12 = MIX(v10, v1, v11);
        new_0[j] = v12;
    }
}

static void NAME(gru_forward_given)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict bias_x_0 = s->bias_x[0];
    const REAL *restrict r_0 = s->r[0];
    const REAL *restrict bias_r_0 = s->bias_r[0];
    REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict bias_x_1 = s->bias_x[1];
    const REAL *restrict r_1 = s->r[1];
    const REAL *restrict bias_r_1 = s->bias_r[1];
    REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict bias_x_2 = s->bias_x[2];
    const REAL *restrict r_2 = s->r[2];
    const REAL *restrict bias_r_2 = s->bias_r[2];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict update = s->update;
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict drop_0 = s->drop[0];
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict add_0 = s->add[0];
    REAL *restrict slot_0 = s->slot[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j] + bias_x_0[j];
        REAL v1 = r_0[j] + bias_r_0[j];
        REAL v2 = (v0 + v1);
        REAL v3 = SIGMOID(v2);
        REAL v4 = gate_1[j] + bias_x_1[j];
        REAL v5 = r_1[j] + bias_r_1[j];
        REAL v6 = (v4 + v5);
        REAL v7 = SIGMOID(v6);
        REAL v8 = gate_2[j] + bias_x_2[j];
        REAL v9 = r_2[j] + bias_r_2[j];
        REAL v10 = (v3 * v9);
        REAL v11 = (v8 + v10);
        REAL v12 = TANH(v11);
        REAL v13 = old_0[j];
        REAL v14 = (v7 * v13);
        REAL v15 = ((REAL)1.0 - v7);
        REAL v16 = (v15 * v12);
        REAL v17 = update[j];
        REAL v18 = LESS(v16, v17);
        REAL v19 = (v14 + v18);
        REAL v20 = zero_0[j];
        REAL v21 = LESS(v19, v20);
        REAL v22 = drop_0[j];
        REAL v23 = LESS(v21, v22);
        REAL v24 = zone_0[j];
        REAL v25 = MIX(v23, v13, v24);
        REAL v26 = add_0[j];
        REAL v27 = ALSO(v25, v13, v26);
        gate_0[j] = v3;
        gate_1[j] = v7;
        gate_2[j] = v12;
        slot_0[j] = v9;
        new_0[j] = v27;
    }
}

static void NAME(gru_backward_given)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict dstate_0 = s->dstate[0];
    const REAL *restrict dy = s->dy;
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict drop_0 = s->drop[0];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict update = s->update;
    const REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict slot_0 = s->slot[0];
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict add_0 = s->add[0];
    REAL *restrict dx_0 = s->dx[0];
    REAL *restrict dx_1 = s->dx[1];
    REAL *restrict dx_2 = s->dx[2];
    REAL *restrict dr_0 = s->dr[0];
    REAL *restrict dr_1 = s->dr[1];
    REAL *restrict dr_2 = s->dr[2];
    REAL *restrict dupdate = s->dupdate;
    REAL *restrict dzero_0 = s->dzero[0];
    REAL *restrict ddrop_0 = s->ddrop[0];
    REAL *restrict dzone_0 = s->dzone[0];
    REAL *restrict dadd_0 = s->dadd[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = dstate_0[j] + dy[j];
        REAL v1 = zone_0[j];
        REAL v2 = ((REAL)1.0 - v1);
        REAL v3 = (v0 * v2);
        REAL v4 = drop_0[j];
        REAL v5 = ((REAL)1.0 - v4);
        REAL v6 = (v3 * v5);
        REAL v7 = zero_0[j];
        REAL v8 = ((REAL)1.0 - v7);
        REAL v9 = (v6 * v8);
        REAL v10 = update[j];
        REAL v11 = ((REAL)1.0 - v10);
        REAL v12 = (v9 * v11);
        REAL v13 = gate_1[j];
        REAL v14 = ((REAL)1.0 - v13);
        REAL v15 = (v12 * v14);
        REAL v16 = gate_2[j];
        REAL v17 = (v16 * v16);
        REAL v18 = ((REAL)1.0 - v17);
        REAL v19 = (v15 * v18);
        REAL v20 = slot_0[j];
        REAL v21 = (v19 * v20);
        REAL v22 = gate_0[j];
        REAL v23 = ((REAL)1.0 - v22);
        REAL v24 = (v22 * v23);
        REAL v25 = (v21 * v24);
        REAL v26 = (v12 * v16);
        REAL v27 = (-v26);
        REAL v28 = old_0[j];
        REAL v29 = (v9 * v28);
        REAL v30 = (v27 + v29);
        REAL v31 = (v13 * v14);
        REAL v32 = (v30 * v31);
        REAL v33 = (v19 * v22);
        REAL v34 = add_0[j];
        REAL v35 = (v0 * v34);
        REAL v36 = (v0 * v1);
        REAL v37 = (v35 + v36);
        REAL v38 = (v9 * v13);
        REAL v39 = (v37 + v38);
        REAL v40 = (v14 * v16);
        REAL v41 = (v9 * v40);
        REAL v42 = (-v41);
        REAL v43 = (v13 * v28);
        REAL v44 = LESS(v40, v10);
        REAL v45 = (v43 + v44);
        REAL v46 = (v6 * v45);
        REAL v47 = (-v46);
        REAL v48 = LESS(v45, v7);
        REAL v49 = (v3 * v48);
        REAL v50 = (-v49);
        REAL v51 = LESS(v48, v4);
        REAL v52 = (v28 - v51);
        REAL v53 = (v0 * v52);
        REAL v54 = (v0 * v28);
        dx_0[j] = v25;
        dx_1[j] = v32;
        dx_2[j] = v19;
        dr_0[j] = v25;
        dr_1[j] = v32;
        dr_2[j] = v33;
        dstate_0[j] = v39;
        dupdate[j] = v42;
        dzero_0[j] = v47;
        ddrop_0[j] = v50;
        dzone_0[j] = v53;
        dadd_0[j] = v54;
    }
}

static void NAME(gru_again_given)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict gate_1 = s->gate[1];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict gate_2 = s->gate[2];
    const REAL *restrict update = s->update;
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict drop_0 = s->drop[0];
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict add_0 = s->add[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_1[j];
        REAL v1 = old_0[j];
        REAL v2 = (v0 * v1);
        REAL v3 = ((REAL)1.0 - v0);
        REAL v4 = gate_2[j];
        REAL v5 = (v3 * v4);
        REAL v6 = update[j];
        REAL v7 = LESS(v5, v6);
        REAL v8 = (v2 + v7);
        REAL v9 = zero_0[j];
        REAL v10 = LESS(v8, v9);
        REAL v11 = drop_0[j];
        REAL v12 = LESS(v10, v11);
        REAL v13 = zone_0[j];
        REAL v14 = MIX(v12, v1, v13);
        REAL v15 = add_0[j];
        REAL v16 = ALSO(v14, v1, v15);
        new_0[j] = v16;
    }
}

static void NAME(rnn_tanh_forward_zoneout)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict bias_x_0 = s->bias_x[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j] + bias_x_0[j];
        REAL v1 = TANH(v0);
        REAL v2 = old_0[j];
        REAL v3 = zone_0[j];
        REAL v4 = MIX(v1, v2, v3);
        gate_0[j] = v1;
        new_0[j] = v4;
    }
}

static void NAME(rnn_tanh_backward_zoneout)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict dstate_0 = s->dstate[0];
    const REAL *restrict dy = s->dy;
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict gate_0 = s->gate[0];
    REAL *restrict dx_0 = s->dx[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = dstate_0[j] + dy[j];
        REAL v1 = zone_0[j];
        REAL v2 = ((REAL)1.0 - v1);
        REAL v3 = (v0 * v2);
        REAL v4 = gate_0[j];
        REAL v5 = (v4 * v4);
        REAL v6 = ((REAL)1.0 - v5);
        REAL v7 = (v3 * v6);
        REAL v8 = (v0 * v1);
        dx_0[j] = v7;
        dstate_0[j] = v8;
    }
}

static void NAME(rnn_tanh_again_zoneout)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j];
        REAL v1 = old_0[j];
        REAL v2 = zone_0[j];
        REAL v3 = MIX(v0, v1, v2);
        new_0[j] = v3;
    }
}

static void NAME(rnn_tanh_forward_all)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict bias_x_0 = s->bias_x[0];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j] + bias_x_0[j];
        REAL v1 = TANH(v0);
        REAL v2 = zero_0[j];
        REAL v3 = LESS(v1, v2);
        REAL v4 = old_0[j];
        REAL v5 = zone_0[j];
        REAL v6 = MIX(v3, v4, v5);
        gate_0[j] = v1;
        new_0[j] = v6;
    }
}

static void NAME(rnn_tanh_backward_all)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict dstate_0 = s->dstate[0];
    const REAL *restrict dy = s->dy;
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict gate_0 = s->gate[0];
    REAL *restrict dx_0 = s->dx[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = dstate_0[j] + dy[j];
        REAL v1 = zone_0[j];
        REAL v2 = ((REAL)1.0 - v1);
        REAL v3 = (v0 * v2);
        REAL v4 = zero_0[j];
        REAL v5 = ((REAL)1.0 - v4);
        REAL v6 = (v3 * v5);
        REAL v7 = gate_0[j];
        REAL v8 = (v7 * v7);
        REAL v9 = ((REAL)1.0 - v8);
        REAL v10 = (v6 * v9);
        REAL v11 = (v0 * v1);
        dx_0[j] = v10;
        dstate_0[j] = v11;
    }
}

static void NAME(rnn_tanh_again_all)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j];
        REAL v1 = zero_0[j];
        REAL v2 = LESS(v0, v1);
        REAL v3 = old_0[j];
        REAL v4 = zone_0[j];
        REAL v5 = MIX(v2, v3, v4);
        new_0[j] = v5;
    }
}

static void NAME(rnn_tanh_forward_given)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict bias_x_0 = s->bias_x[0];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict drop_0 = s->drop[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict add_0 = s->add[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j] + bias_x_0[j];
        REAL v1 = TANH(v0);
        REAL v2 = zero_0[j];
        REAL v3 = LESS(v1, v2);
        REAL v4 = drop_0[j];
        REAL v5 = LESS(v3, v4);
        REAL v6 = old_0[j];
        REAL v7 = zone_0[j];
        REAL v8 = MIX(v5, v6, v7);
        REAL v9 = add_0[j];
        REAL v10 = ALSO(v8, v6, v9);
        gate_0[j] = v1;
        new_0[j] = v10;
    }
}

static void NAME(rnn_tanh_backward_given)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict dstate_0 = s->dstate[0];
    const REAL *restrict dy = s->dy;
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict drop_0 = s->drop[0];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict add_0 = s->add[0];
    const REAL *restrict old_0 = s->old[0];
    REAL *restrict dx_0 = s->dx[0];
    REAL *restrict dzero_0 = s->dzero[0];
    REAL *restrict ddrop_0 = s->ddrop[0];
    REAL *restrict dzone_0 = s->dzone[0];
    REAL *restrict dadd_0 = s->dadd[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = dstate_0[j] + dy[j];
        REAL v1 = zone_0[j];
        REAL v2 = ((REAL)1.0 - v1);
        REAL v3 = (v0 * v2);
        REAL v4 = drop_0[j];
        REAL v5 = ((REAL)1.0 - v4);
        REAL v6 = (v3 * v5);
        REAL v7 = zero_0[j];
        REAL v8 = ((REAL)1.0 - v7);
        REAL v9 = (v6 * v8);
        REAL v10 = gate_0[j];
        REAL v11 = (v10 * v10);
        REAL v12 = ((REAL)1.0 - v11);
        REAL v13 = (v9 * v12);
        REAL v14 = add_0[j];
        REAL v15 = (v0 * v14);
        REAL v16 = (v0 * v1);
        REAL v17 = (v15 + v16);
        REAL v18 = (v6 * v10);
        REAL v19 = (-v18);
        REAL v20 = LESS(v10, v7);
        REAL v21 = (v3 * v20);
        REAL v22 = (-v21);
        REAL v23 = old_0[j];
        REAL v24 = LESS(v20, v4);
        REAL v25 = (v23 - v24);
        REAL v26 = (v0 * v25);
        REAL v27 = (v0 * v23);
        dx_0[j] = v13;
        dstate_0[j] = v17;
        dzero_0[j] = v19;
        ddrop_0[j] = v22;
        dzone_0[j] = v26;
        dadd_0[j] = v27;
    }
}

static void NAME(rnn_tanh_again_given)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict drop_0 = s->drop[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict add_0 = s->add[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j];
        REAL v1 = zero_0[j];
        REAL v2 = LESS(v0, v1);
        REAL v3 = drop_0[j];
        REAL v4 = LESS(v2, v3);
        REAL v5 = old_0[j];
        REAL v6 = zone_0[j];
        REAL v7 = MIX(v4, v5, v6);
        REAL v8 = add_0[j];
        REAL v9 = ALSO(v7, v5, v8);
        new_0[j] = v9;
    }
}

static void NAME(rnn_relu_forward_zoneout)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict bias_x_0 = s->bias_x[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j] + bias_x_0[j];
        REAL v1 = RELU(v0);
        REAL v2 = old_0[j];
        REAL v3 = zone_0[j];
        REAL v4 = MIX(v1, v2, v3);
        gate_0[j] = v1;
        new_0[j] = v4;
    }
}

static void NAME(rnn_relu_backward_zoneout)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict gate_0 = s->gate[0];
    REAL *restrict dstate_0 = s->dstate[0];
    const REAL *restrict dy = s->dy;
    const REAL *restrict zone_0 = s->zone[0];
    REAL *restrict dx_0 = s->dx[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j];
        REAL v1 = dstate_0[j] + dy[j];
        REAL v2 = zone_0[j];
        REAL v3 = ((REAL)1.0 - v2);
        REAL v4 = (v1 * v3);
        REAL v5 = ((v0 > (REAL)0.0) ? v4 : (REAL)0.0);
        REAL v6 = (v1 * v2);
        dx_0[j] = v5;
        dstate_0[j] = v6;
    }
}

static void NAME(rnn_relu_again_zoneout)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j];
        REAL v1 = old_0[j];
        REAL v2 = zone_0[j];
        REAL v3 = MIX(v0, v1, v2);
        new_0[j] = v3;
    }
}

static void NAME(rnn_relu_forward_all)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict bias_x_0 = s->bias_x[0];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j] + bias_x_0[j];
        REAL v1 = RELU(v0);
        REAL v2 = zero_0[j];
        REAL v3 = LESS(v1, v2);
        REAL v4 = old_0[j];
        REAL v5 = zone_0[j];
        REAL v6 = MIX(v3, v4, v5);
        gate_0[j] = v1;
        new_0[j] = v6;
    }
}

static void NAME(rnn_relu_backward_all)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict gate_0 = s->gate[0];
    REAL *restrict dstate_0 = s->dstate[0];
    const REAL *restrict dy = s->dy;
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict zero_0 = s->zero[0];
    REAL *restrict dx_0 = s->dx[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j];
        REAL v1 = dstate_0[j] + dy[j];
        REAL v2 = zone_0[j];
        REAL v3 = ((REAL)1.0 - v2);
        REAL v4 = (v1 * v3);
        REAL v5 = zero_0[j];
        REAL v6 = ((REAL)1.0 - v5);
        REAL v7 = (v4 * v6);
        REAL v8 = ((v0 > (REAL)0.0) ? v7 : (REAL)0.0);
        REAL v9 = (v1 * v2);
        dx_0[j] = v8;
        dstate_0[j] = v9;
    }
}

static void NAME(rnn_relu_again_all)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j];
        REAL v1 = zero_0[j];
        REAL v2 = LESS(v0, v1);
        REAL v3 = old_0[j];
        REAL v4 = zone_0[j];
        REAL v5 = MIX(v2, v3, v4);
        new_0[j] = v5;
    }
}

static void NAME(rnn_relu_forward_given)(const STEP *s, int64_t from, int64_t to) {
    REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict bias_x_0 = s->bias_x[0];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict drop_0 = s->drop[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict add_0 = s->add[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j] + bias_x_0[j];
        REAL v1 = RELU(v0);
        REAL v2 = zero_0[j];
        REAL v3 = LESS(v1, v2);
        REAL v4 = drop_0[j];
        REAL v5 = LESS(v3, v4);
        REAL v6 = old_0[j];
        REAL v7 = zone_0[j];
        REAL v8 = MIX(v5, v6, v7);
        REAL v9 = add_0[j];
        REAL v10 = ALSO(v8, v6, v9);
        gate_0[j] = v1;
        new_0[j] = v10;
    }
}

static void NAME(rnn_relu_backward_given)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict gate_0 = s->gate[0];
    REAL *restrict dstate_0 = s->dstate[0];
    const REAL *restrict dy = s->dy;
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict drop_0 = s->drop[0];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict add_0 = s->add[0];
    const REAL *restrict old_0 = s->old[0];
    REAL *restrict dx_0 = s->dx[0];
    REAL *restrict dzero_0 = s->dzero[0];
    REAL *restrict ddrop_0 = s->ddrop[0];
    REAL *restrict dzone_0 = s->dzone[0];
    REAL *restrict dadd_0 = s->dadd[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j];
        REAL v1 = dstate_0[j] + dy[j];
        REAL v2 = zone_0[j];
        REAL v3 = ((REAL)1.0 - v2);
        REAL v4 = (v1 * v3);
        REAL v5 = drop_0[j];
        REAL v6 = ((REAL)1.0 - v5);
        REAL v7 = (v4 * v6);
        REAL v8 = zero_0[j];
        REAL v9 = ((REAL)1.0 - v8);
        REAL v10 = (v7 * v9);
        REAL v11 = ((v0 > (REAL)0.0) ? v10 : (REAL)0.0);
        REAL v12 = add_0[j];
        REAL v13 = (v1 * v12);
        REAL v14 = (v1 * v2);
        REAL v15 = (v13 + v14);
        REAL v16 = (v7 * v0);
        REAL v17 = (-v16);
        REAL v18 = LESS(v0, v8);
        REAL v19 = (v4 * v18);
        REAL v20 = (-v19);
        REAL v21 = old_0[j];
        REAL v22 = LESS(v18, v5);
        REAL v23 = (v21 - v22);
        REAL v24 = (v1 * v23);
        REAL v25 = (v1 * v21);
        dx_0[j] = v11;
        dstate_0[j] = v15;
        dzero_0[j] = v17;
        ddrop_0[j] = v20;
        dzone_0[j] = v24;
        dadd_0[j] = v25;
    }
}

static void NAME(rnn_relu_again_given)(const STEP *s, int64_t from, int64_t to) {
    const REAL *restrict gate_0 = s->gate[0];
    const REAL *restrict zero_0 = s->zero[0];
    const REAL *restrict drop_0 = s->drop[0];
    const REAL *restrict old_0 = s->old[0];
    const REAL *restrict zone_0 = s->zone[0];
    const REAL *restrict add_0 = s->add[0];
    REAL *restrict new_0 = s->new[0];
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL v0 = gate_0[j];
        REAL v1 = zero_0[j];
        REAL v2 = LESS(v0, v1);
        REAL v3 = drop_0[j];
        REAL v4 = LESS(v2, v3);
        REAL v5 = old_0[j];
        REAL v6 = zone_0[j];
        REAL v7 = MIX(v4, v5, v6);
        REAL v8 = add_0[j];
        REAL v9 = ALSO(v7, v5, v8);
        new_0[j] = v9;
    }
}

static const CELL NAME(cells)[] = {
    {4, 2, 0, 3, 0, {-1, -1}, {0, 1, 0, 0}, 0, {NAME(lstm_forward_zoneout), NAME(lstm_forward_all), NAME(lstm_forward_given)}, {NAME(lstm_backward_zoneout), NAME(lstm_backward_all), NAME(lstm_backward_given)}, {NAME(lstm_again_zoneout), NAME(lstm_again_all), NAME(lstm_again_given)}, NAME(lstm_gates), NAME(lstm_raw), NAME(lstm_shows), NAME(lstm_back_shows), NAME(lstm_back_gates)}, /* lstm */
    {3, 1, 1, -1, 1, {2, -1}, {0, 0, 0, 0}, 0, {NAME(gru_forward_zoneout), NAME(gru_forward_all), NAME(gru_forward_given)}, {NAME(gru_backward_zoneout), NAME(gru_backward_all), NAME(gru_backward_given)}, {NAME(gru_again_zoneout), NAME(gru_again_all), NAME(gru_again_given)}, NULL, NULL, NULL, NULL, NULL}, /* gru */
    {1, 1, 0, -1, 0, {-1, -1}, {0, 0, 0, 0}, 0, {NAME(rnn_tanh_forward_zoneout), NAME(rnn_tanh_forward_all), NAME(rnn_tanh_forward_given)}, {NAME(rnn_tanh_backward_zoneout), NAME(rnn_tanh_backward_all), NAME(rnn_tanh_backward_given)}, {NAME(rnn_tanh_again_zoneout), NAME(rnn_tanh_again_all), NAME(rnn_tanh_again_given)}, NULL, NULL, NULL, NULL, NULL}, /* rnn_tanh */
    {1, 1, 0, -1, 0, {-1, -1}, {0, 0, 0, 0}, 0, {NAME(rnn_relu_forward_zoneout), NAME(rnn_relu_forward_all), NAME(rnn_relu_forward_given)}, {NAME(rnn_relu_backward_zoneout), NAME(rnn_relu_backward_all), NAME(rnn_relu_backward_given)}, {NAME(rnn_relu_again_zoneout), NAME(rnn_relu_again_all), NAME(rnn_relu_again_given)}, NULL, NULL, NULL, NULL, NULL}, /* rnn_relu */
};
