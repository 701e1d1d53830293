-- A store of version 1 as a head wrote it. Never to be changed: such files are out there.
INSERT INTO meta VALUES ('branch', 1);
INSERT INTO meta VALUES ('clean', 1);
INSERT INTO meta VALUES ('lax', 0);
INSERT INTO meta VALUES ('term', 5);
INSERT INTO sessions VALUES (1, 's', 'owner', '5a9f1762{"model":"demo","model_revision":"r1","sampling":{"temperature":0.5,"top_p":null,"min_p":null,"top_k":null,"seed":7},"qos":3,"node_selector":{"zone":"eu"},"expected_output_tokens":64,"replay":"never","engine_options":""}', x'00ff7b', '76a309d1{"temperature":0.5,"top_p":0.9,"min_p":0.0,"top_k":3,"seed":7}', 1.5, 2.5, 0, 0, 4, 2936394991, 'n', 'i', 8589934592);
INSERT INTO context VALUES (1, 0, x'0100000002000000030000009322e0b0');
INSERT INTO context VALUES (1, 3, x'040000004b4826ae');
INSERT INTO generations VALUES (1, 'g', 's', 'owner', '814d175f{"spec":{"max_new_tokens":40,"max_wall_s":1.5,"sampling":{"temperature":null,"top_p":null,"min_p":null,"top_k":3,"seed":null},"stop":[[1,2],[3]],"extend_context":true,"on_disconnect":"continue","disconnect_grace_s":null,"orphan_timeout_s":3.0,"qos":3,"expected_output_tokens":9},"sampling":{"temperature":0.0,"top_p":0.0,"min_p":0.0,"top_k":0,"seed":5},"max_new_tokens":40,"eos_token_ids":[2,7],"context_tokens":3,"branch":1}', 100.5, 102.0, 3, 1, NULL, NULL);
INSERT INTO generations VALUES (2, 'e', 's', 'owner', '55718798{"spec":{"max_new_tokens":40,"max_wall_s":1.5,"sampling":{"temperature":null,"top_p":null,"min_p":null,"top_k":3,"seed":null},"stop":[[1,2],[3]],"extend_context":true,"on_disconnect":"continue","disconnect_grace_s":null,"orphan_timeout_s":3.0,"qos":3,"expected_output_tokens":9},"sampling":{"temperature":0.0,"top_p":0.0,"min_p":0.0,"top_k":0,"seed":5},"max_new_tokens":40,"eos_token_ids":[2,7],"context_tokens":3,"branch":1}', 100.5, 102.0, 2, 0, '278465f7{"reason":"ERROR","context_tokens":3,"output_tokens":4,"attempts":2,"timings":{"queued_s":0.1,"first_token_s":null,"total_s":1.0,"longest_gap_s":0.2,"last_token_s":null},"stop_index":null,"error":{"reason":"ENGINE_ERROR","message":"no","metadata":{"nextIndex":"4"}}}', 3.0);
INSERT INTO marks VALUES (1, 1, 0, 'c0d4f33fm{"from_node":"a","to_node":"b","cause":"LINK_LOST","next_index":2,"gap_s":0.25,"epoch":9}');
INSERT INTO batches VALUES (2, x'0100000001000000000000000200000002000000090000000a00000060af891b');
INSERT INTO outputs VALUES (1, 0, x'07000000080000009ffe53aa');
INSERT INTO outputs VALUES (1, 2, x'090000000a0000002624d015');
INSERT INTO requests VALUES ('o', 'r', x'01', '3ceae297is', x'', 5.0);
INSERT INTO cancels VALUES ('o', 'x', 6.0);
INSERT INTO revokes VALUES ('n', 'i', 's', 3);
INSERT INTO listed VALUES ('10.0.0.1:8454', 1);
INSERT INTO node_marks VALUES ('n', 'cordon', 'o', 1.0, 'why');
